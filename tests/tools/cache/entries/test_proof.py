"""Tests of `cache verify --recompile|--run`, on a piece that Inductor compiled."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Loaded, Store
from piecegraph.compiler.api import compile as compile_module
from piecegraph.config import CompileConfig
from piecegraph.tools.cache.entries.proof import Proof, Prover
from tests.tools.cache.models import CacheCommand


class Toy(nn.Module):
    """A model of one piece: a library call and a generated kernel."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.factor


def user_with(module: nn.Module, home: Path) -> Path:
    """Return a user whose cache holds the piece of `module`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home / "data"))
        config = CompileConfig(cache_dir=str(home / "cache"), cache="pieces", compile_workers=0)
        with compile_module(module, config, dynamic_dims={"x": {0: "num_tokens"}}, example_inputs=[torch.ones(4, 8)]):
            pass
    return home


def piece_of(home: Path) -> Loaded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home / "data"))
        store = Store.open(home / "cache")
        (row,) = store.list()
        found = store.verify(row.key)
    assert isinstance(found, Loaded)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return user_with(Toy(), tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def other_code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The artifact of a piece with the same inputs and outputs that computes something else."""
    other = piece_of(user_with(Toy(2.001), tmp_path_factory.mktemp("other")))
    return {role: data for role, data in other.blobs.items() if role == "artifact" or role.startswith("library/")}


@pytest.fixture(autouse=True)
def as_that_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(home / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)


@pytest.fixture
def piece(home: Path) -> Loaded:
    return piece_of(home)


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    with Prover() as prover:
        yield prover


def changed(piece: Loaded, *, blobs: dict[str, bytes] | None = None, **factors: Any) -> Loaded:
    """Return what the store would load for an entry that is otherwise the same."""
    made_of = {**copy.deepcopy(dict(piece.entry.factors)), **factors}
    return Loaded(replace(piece.entry, factors=made_of), {**piece.blobs, **(blobs or {})})


def another_graph(piece: Loaded) -> dict[str, bytes]:
    text = piece.blobs["graph.json"]
    assert b"tanh" in text
    return {"graph.json": text.replace(b"tanh", b"sigmoid")}


@pytest.mark.slow
def test_compiled_again_it_is_the_same_bit_for_bit(prover: Prover, piece: Loaded) -> None:
    assert prover.recompile(piece) == Proof()


@pytest.mark.slow
def test_another_graph_makes_other_code(prover: Prover, piece: Loaded) -> None:
    proof = prover.recompile(changed(piece, blobs=another_graph(piece)))
    assert (proof.problem, proof.detail) == ("not reproducible", "the generated code is another")


@pytest.mark.slow
def test_a_library_with_other_machine_code_is_not_the_same(prover: Prover, piece: Loaded) -> None:
    (role,) = (role for role in piece.blobs if role.startswith("library/"))
    data = bytearray(piece.blobs[role])
    data[data.index(b"kernel")] ^= 1
    proof = prover.recompile(changed(piece, blobs={role: bytes(data)}))
    assert (proof.problem, proof.detail) == ("not reproducible", "the code is the same, its C++ libraries are others")


def without_digest(piece: Loaded, proof: dict[str, str] | None) -> dict[str, bytes]:
    """Return the blob of a piece that was not run when it was compiled."""
    return {"piece": json.dumps({**json.loads(piece.blobs["piece"]), "proof": proof}).encode()}


def with_other_code(piece: Loaded, other_code: dict[str, bytes]) -> dict[str, bytes]:
    kept = {role: data for role, data in piece.blobs.items() if not role.startswith("library/")}
    return {**kept, **other_code}


def stored_digest(piece: Loaded) -> str:
    digest: str = json.loads(piece.blobs["piece"])["proof"]["digest"]
    return digest


def test_it_computes_what_it_did_when_it_was_compiled(prover: Prover, piece: Loaded) -> None:
    assert prover.run(piece) == Proof(output_digest=stored_digest(piece))


def test_it_is_run_with_the_settings_it_was_compiled_with(prover: Prover, piece: Loaded) -> None:
    """The process's own settings are restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert prover.run(piece).problem == ""
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_code_that_computes_something_else_is_found_out(
    prover: Prover, piece: Loaded, other_code: dict[str, bytes]
) -> None:
    proof = prover.run(Loaded(piece.entry, with_other_code(piece, other_code)))
    assert (proof.problem, proof.is_wrong, proof.output_digest) == ("computes something else", True, None)
    found, stored = re.findall(r"[0-9a-f]{64}", proof.detail)
    assert stored == stored_digest(piece) != found


@pytest.mark.parametrize(
    ("proof", "why"),
    [({"reason": "it is too large"}, "it is too large"), (None, "it was compiled by an older version")],
)
def test_without_a_digest_its_graph_is_run_too(
    prover: Prover, piece: Loaded, proof: dict[str, str] | None, why: str
) -> None:
    """The output says so; the digest is still that of the outputs for the seed."""
    blobs = without_digest(piece, proof)
    ran = prover.run(changed(piece, blobs=blobs))
    assert (ran.problem, ran.output_digest) == ("", stored_digest(piece))
    assert ran.detail == f"no digest was stored ({why}): compared with its graph, run by eager torch"
    ran = prover.run(changed(piece, blobs={**blobs, **another_graph(piece)}))
    assert (ran.problem, ran.is_wrong, ran.output_digest) == ("computes something else", True, None)
    assert "value 0 is " in ran.detail


def test_what_ran_when_it_was_compiled_and_does_not_now_is_wrong(prover: Prover, piece: Loaded) -> None:
    """For example, it takes other inputs. A piece that never ran is not verified."""
    text = piece.blobs["graph.json"]
    assert b"[16, 8]" in text
    other = {"graph.json": text.replace(b"[16, 8]", b"[15, 8]")}
    ran = prover.run(changed(piece, blobs=other))
    assert (ran.problem, ran.is_wrong) == ("cannot be run", True)
    ran = prover.run(changed(piece, blobs={**other, **without_digest(piece, None)}))
    assert (ran.problem, ran.is_wrong) == ("cannot be run", False)


@pytest.mark.parametrize(
    ("factors", "detail"),
    [
        ({"machine": {"device": "cuda", "cpu": {}, "gpu": {"name": "H999", "index": 0}}}, "compiled for H999"),
        ({"build": {"torch": {"version": "1.0"}}}, "build.torch.version"),
    ],
)
def test_a_piece_for_another_machine_cannot_be_checked_here(
    prover: Prover, piece: Loaded, factors: dict[str, Any], detail: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("says that there is no GPU")
    for proof in (prover.recompile(changed(piece, **factors)), prover.run(changed(piece, **factors))):
        assert proof.problem.startswith("another ")
        assert detail in proof.detail
        assert not proof.is_wrong


def test_a_graph_that_is_no_data_cannot_be_proved(prover: Prover, piece: Loaded) -> None:
    blobs = {role: data for role, data in piece.blobs.items() if role != "graph.json"}
    assert prover.run(Loaded(piece.entry, blobs)).detail == "its graph is not plain data"


def test_an_artifact_that_torch_cannot_read(prover: Prover, piece: Loaded) -> None:
    assert prover.run(changed(piece, blobs={"artifact": b"no artifact"})).problem == "cannot be loaded"


@pytest.mark.slow
def test_on_the_command_line(cache: CacheCommand, piece: Loaded) -> None:
    (row,) = cache.json("verify", "--run", "--recompile")
    assert (row["result"], row["recompile"], row["run"]) == ("ok", "ok", "ok")
    assert len(row["output_digest"]) == 64
    (row,) = cache.json("verify")
    assert (row["result"], row["recompile"], row["run"], row["output_digest"]) == ("ok", None, None, None)


def test_signed_code_that_computes_something_else_is_corrupt(
    cache: CacheCommand, home: Path, piece: Loaded, other_code: dict[str, bytes], tmp_path: Path
) -> None:
    """Every signature and every digest of bytes is right."""
    shutil.copytree(home / "cache", tmp_path / "cache")
    blobs = with_other_code(piece, other_code)
    Store.open(tmp_path / "cache").save(Entry.of(piece.entry.factors, blobs, created=0.0), blobs)
    elsewhere = ("--cache-dir", str(tmp_path / "cache"))
    (row,) = cache.json("verify", *elsewhere)
    assert row["result"] == "ok"
    (row,) = cache.json("verify", "--run", *elsewhere, code=1)
    assert (row["result"], row["reason"]) == ("corrupt", "computes something else")
    assert stored_digest(piece) in row["detail"]


def test_what_is_wrong_is_corrupt_and_what_is_not_proved_is_not_verified(
    cache: CacheCommand, piece: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prover, "run", lambda self, loaded: Proof("computes something else", "by far", is_wrong=True))
    monkeypatch.setattr(Prover, "recompile", lambda self, loaded: Proof("not reproducible", "the code"))
    (row,) = cache.json("verify", "--recompile", code=4)
    assert (row["result"], row["reason"], row["recompile"]) == ("not verified", "not reproducible", "not reproducible")
    (row,) = cache.json("verify", "--run", "--recompile", code=5)
    assert (row["result"], row["reason"], row["detail"]) == ("corrupt", "computes something else", "by far")
