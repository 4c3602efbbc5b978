"""Pieces in the cache: the key holds what determines their code, and a loaded piece computes the same."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.cache.store.keys import key_of
from piecegraph.cache.store.store import Loaded, Store
from piecegraph.compiler.rewriting.post_grad import PostGrad
from piecegraph.compiler.store import piece_proof
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.store.piece_proof import OutputDigest
from piecegraph.compiler.store.piece_store import PieceFacts, PieceStore, facts_of, piece_factors
from piecegraph.errors import KeyFactorError
from tests.compiler.store.small_models import SIZE, Small, compiled, config
from tests.compiler.user_passes import ReluToClampInInductor


def pieces_of(root: Path) -> list[Loaded]:
    store = Store.open(root)
    found = [store.verify(row.key) for row in store.list()]
    return [each for each in found if isinstance(each, Loaded) and each.entry.factors["kind"] == "piece"]


def test_each_factor_makes_another_key() -> None:
    (piece,) = compiled(Small(), compiler="eager").unique_pieces
    nothing = PostGrad()
    keys = [
        key_of(piece_factors(piece, size, options, passes))
        for size, options, passes in (
            (None, {}, nothing),
            (1, {}, nothing),
            (2, {}, nothing),
            (None, {"max_autotune": True}, nothing),
            (None, {}, PostGrad((ReluToClampInInductor(),))),
            (None, {}, PostGrad((ReluToClampInInductor(bound=2.0),))),
        )
    ]
    assert len(set(keys)) == len(keys)
    with pytest.raises(KeyFactorError, match=r"factor options\.f is"):
        key_of(piece_factors(piece, None, {"f": print}, nothing))


def test_equal_pieces_of_different_models_are_one_entry(whole_cache: Path) -> None:
    compiled(Small(2))
    deeper = compiled(Small(5))
    assert deeper.report().cache.state == "miss"
    assert deeper.report().cache.loaded_pieces == 1
    assert len(pieces_of(whole_cache)) == 1


class Scaled(torch.nn.Module):
    """`scale` is in the graph of its one piece, as an epsilon is."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(SIZE, SIZE)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.addmm(self.linear.bias, x, self.linear.weight, alpha=self.scale)
        result: torch.Tensor = torch.ops.pgtoy.triple.default(scaled)
        return result


@pytest.mark.parametrize("keeps", [pytest.param(True, marks=pytest.mark.slow), "pieces"])
def test_models_that_differ_in_a_scalar_share_no_artifact(keeps: bool | str, whole_cache: Path) -> None:
    """The difference may be tiny; each model computes what it computes without a cache."""
    scales = (1.5, math.nextafter(1.5, 2.0), 2.5)
    x = torch.rand(3, SIZE)
    for loaded in (0, 1):
        for scale in scales:
            model = compiled(Scaled(scale), cache=keeps)
            assert model.report().cache.loaded_pieces == loaded
            assert torch.equal(model(x), compiled(Scaled(scale), cache=False)(x))
    assert len(pieces_of(whole_cache)) == len(scales)


def test_an_entry_has_the_documented_blobs(whole_cache: Path) -> None:
    """docs/cache_format.md lists the blobs by role."""
    compiled(Small(), compile_sizes=(2,))
    found = pieces_of(whole_cache)
    assert {each.entry.notes["size"] for each in found} == {None, 2}
    for each in found:
        assert {"piece", "artifact", "graph", "graph.json", "code"} <= set(each.blobs)
        assert each.entry.seconds["compile"] > 0
        assert "def call" in each.blobs["code"].decode()
        proof = facts_of(each).proof
        assert isinstance(proof, OutputDigest)
        assert set(proof.sizes.values()) == {each.entry.notes["size"] or piece_proof.SIZE}
        assert each.entry.notes["nodes"] == 1
        assert each.entry.versions["torch"] == torch.__version__


def test_a_blob_of_an_older_version_has_no_proof(whole_cache: Path) -> None:
    compiled(Small())
    (loaded,) = pieces_of(whole_cache)
    described = json.loads(loaded.blobs["piece"])
    del described["proof"]
    older = Loaded(loaded.entry, {**loaded.blobs, "piece": json.dumps(described).encode()})
    assert facts_of(older) == replace(facts_of(loaded), proof=None)


def test_a_piece_that_cannot_be_loaded_is_a_miss_with_a_reason(whole_cache: Path, tmp_path: Path) -> None:
    """The entry is signed by our key, but another build of torch with the same version may have written it."""
    compiled(Small())
    (loaded,) = pieces_of(whole_cache)
    store = Store.open(whole_cache)
    blobs = {**loaded.blobs, "artifact": loaded.blobs["artifact"][:-1]}
    store.save(type(loaded.entry).of(loaded.entry.factors, blobs, created=0.0), blobs)
    cache = CompileCache.open(config())
    assert PieceStore(cache, tmp_path).load(loaded.entry.key) is None
    assert cache.misses[loaded.entry.key].startswith("loading it: RuntimeError: Bytes object is corrupted")


@pytest.mark.parametrize(("takes", "given"), [(None, (1, 2, 3)), ((1,), (2,)), ((0, 2), (1, 3))])
def test_a_static_piece_takes_no_sizes(takes: tuple[int, ...] | None, given: tuple[int, ...]) -> None:
    run = PieceFacts(nodes=1, kernels=1, takes=takes).adapted(lambda *inputs: inputs)
    assert run(1, 2, 3) == given


def test_pieces_are_shared_with_torch_compile(whole_cache: Path) -> None:
    """torch traces each time, and nothing is compiled the second time."""
    options: Any = {"split_ops": ["pgtoy::triple"], "passes": (), "compile_workers": 0}
    reports = []
    outputs = []
    for _ in range(2):
        torch._dynamo.reset()
        model = Small().requires_grad_(False)
        by_name = torch.compile(model, backend="piecegraph", fullgraph=True, dynamic=True, options=options)
        outputs.append(by_name(torch.ones(3, SIZE)))
        (graph,) = pg.compiled_models(by_name)
        reports.append(graph.report())
    assert [report.cache.loaded_pieces for report in reports] == [0, reports[0].num_unique_pieces]
    for report in reports:
        assert (report.cache.state, report.cache.reason) == ("off", "under torch.compile, torch traces each time")
    assert torch.equal(*outputs)
    assert all(isinstance(facts_of(each).proof, OutputDigest) for each in pieces_of(whole_cache))
