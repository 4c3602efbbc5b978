"""The digest of a piece's outputs: equal in every run, different for other code, and absent where a run is unsafe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
import tests.compiler.toy  # noqa: F401  (defines an op)
from piecegraph.compiler.inductor.files import LoadedPiece, PieceFiles
from piecegraph.compiler.splitting.piece_format import dump_piece
from piecegraph.compiler.store import piece_proof
from piecegraph.compiler.store.piece_proof import (
    NotRun,
    OutputDigest,
    Trial,
    proof_as_data,
    proof_from_data,
    prove,
    sizes_of,
)


def text_of(module: nn.Module, example: torch.Tensor | None = None) -> str:
    """The graph of a module that is one piece, of rows that may vary."""
    config = pg.CompileConfig(compiler="eager", passes=())
    example = torch.ones(3, 4) if example is None else example
    (piece,) = pg.compile(module, config, dynamic_dims={"x": {0: "n"}}, example_inputs=(example,)).unique_pieces
    return dump_piece(piece.graph_module)


def loaded(run: Callable[..., Sequence[Any]], folder: Path) -> LoadedPiece:
    return LoadedPiece(run, folder, folder, PieceFiles(artifact=b""))


def eager(text: str, size: int | None = None) -> Callable[..., Sequence[Any]]:
    """The graph itself in the place of code that was made of it."""
    graph = Trial(text, sizes_of(text, size), 0, is_static=True).graph
    return lambda *inputs: graph(*(each for each in inputs if isinstance(each, torch.Tensor)))


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Lookup(nn.Module):
    """Rows of a table of three; the size is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.table(x)
        return result


class Accumulate(nn.Module):
    """Writes to a buffer."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return x * 2


@pytest.mark.parametrize("size", [None, 3])
def test_the_digest_is_that_of_the_seed_and_the_sizes(tmp_path: Path, size: int | None) -> None:
    text = text_of(Scale())
    proof = prove(loaded(eager(text, size), tmp_path), text, size)
    assert isinstance(proof, OutputDigest)
    assert list(proof.sizes.values()) == [piece_proof.SIZE if size is None else size]
    assert prove(loaded(eager(text, size), tmp_path), text, size) == proof
    tripled = loaded(lambda *inputs: [each * 3 for each in inputs if isinstance(each, torch.Tensor)], tmp_path)
    wrong = prove(tripled, text, size)
    assert isinstance(wrong, OutputDigest)
    assert wrong.digest != proof.digest


def test_a_dynamic_piece_is_given_sizes_and_a_static_one_is_not() -> None:
    x = {"dtype": "float32", "device": "cpu", "shape": ["2*u0", 4], "stride": [4, 1], "offset": 0}
    nodes = [
        ["placeholder", "n", {"size": "u0"}],
        ["placeholder", "x", x],
        ["call_function", "mul", "_operator.mul", {"tuple": [{"node": 1}, {"node": 0}]}, {"dict": []}],
        ["output", "output", {"tuple": [{"node": 2}]}],
    ]
    text = json.dumps({"symbols": [{"name": "u0", "lower": 0, "upper": None, "hint": None}], "nodes": nodes})
    sizes = sizes_of(text, None)
    dynamic = Trial(text, sizes, 0, is_static=False).inputs()
    static = Trial(text, sizes, 0, is_static=True).inputs()
    assert dynamic[0] == piece_proof.SIZE
    (tensor,) = static
    assert tensor.shape == (2 * piece_proof.SIZE, 4)
    assert torch.equal(tensor, dynamic[1])


def test_a_size_is_clamped_to_its_range() -> None:
    ranges = ((2, None), (16, None), (2, 4))
    symbols = [{"name": f"s{i}", "lower": low, "upper": up, "hint": None} for i, (low, up) in enumerate(ranges)]
    assert sizes_of(json.dumps({"symbols": symbols}), None) == {"s0": 8, "s1": 16, "s2": 4}


def test_whole_numbers_are_valid_indices() -> None:
    text = text_of(Lookup(), torch.arange(3))
    trial = Trial(text, sizes_of(text, 64), 0, is_static=True)
    (indices,) = (each for each in trial.inputs() if each.dtype == torch.int64)
    assert sorted(set(indices.flatten().tolist())) == [0, 1, 2]


def test_inputs_that_a_piece_writes_are_in_the_digest(tmp_path: Path) -> None:
    text = text_of(Accumulate())
    trial = Trial(text, sizes_of(text, 3), 0, is_static=True)
    assert trial.writes
    run = eager(text, 3)
    inputs, untouched = trial.inputs(), trial.inputs()
    outputs = list(run(*inputs))
    assert trial.digest(inputs, outputs) != trial.digest(untouched, outputs)
    assert isinstance(prove(loaded(run, tmp_path), text, 3), OutputDigest)


def test_uninitialized_outputs_are_not_in_the_digest() -> None:
    class Room(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, torch.empty_like(x).view(-1)

    text = text_of(Room())
    trial = Trial(text, sizes_of(text, 3), 0, is_static=True)
    inputs = trial.inputs()
    computed = torch.ones(3, 4)
    digests = {trial.digest(inputs, [computed, torch.full((12,), value)]) for value in (1.0, 2.0)}
    assert len(digests) == 1


def test_a_piece_that_is_not_run_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(Scale())

    def fails(*inputs: Any) -> Sequence[Any]:
        raise RuntimeError("no kernel")

    def noise(*inputs: Any) -> Sequence[Any]:
        return [torch.full((8, 4), float(next(count)))]

    count = iter(range(2))
    assert prove(loaded(fails, tmp_path), None, None) == NotRun("its graph is not plain data")
    assert prove(loaded(fails, tmp_path), text, None) == NotRun("running it: RuntimeError: no kernel")
    assert prove(loaded(noise, tmp_path), text, None) == NotRun("it does not compute the same twice")
    monkeypatch.setitem(piece_proof.MAX_BYTES, "cpu", 0)
    assert prove(loaded(fails, tmp_path), text, None) == NotRun("a run takes 0 MiB; at most 0 MiB are used for one")


def test_a_piece_with_a_foreign_op_is_not_run(tmp_path: Path) -> None:
    """A foreign op may, for example, communicate with another process."""

    class Foreign(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.pgtoy.triple.default(x)
            return result * 2

    text = text_of(Foreign())
    assert prove(loaded(eager(text), tmp_path), text, None) == NotRun(
        "torch.ops.pgtoy.triple.default may do more than compute"
    )


def test_the_random_state_of_the_process_is_restored(tmp_path: Path) -> None:
    text = text_of(Scale())
    before = torch.get_rng_state()
    prove(loaded(lambda *inputs: [torch.rand(8, 4)], tmp_path), text, None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("proof", [NotRun("why"), OutputDigest(seed=1, sizes={"s0": 8}, digest="ab")])
def test_a_proof_survives_json(proof: NotRun | OutputDigest) -> None:
    assert proof_from_data(json.loads(json.dumps(proof_as_data(proof)))) == proof
