"""A piece that Inductor fails on, or that fails its own checks when it first runs, runs as its graph: in this start and
in the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler.building import inductor_pieces as inductor
from piecegraph.compiler.inductor.compile import standalone_compile
from piecegraph.compiler.inductor.files import load_files
from piecegraph.compiler.piece_compilers.first_run import WatchedPiece
from piecegraph.compiler.store import piece_store
from piecegraph.errors import PieceCompileFailed
from tests.compiler.store.small_models import SIZE, Small, compiled, state


def inputs(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows))


def fail_to_compile(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(inductor, "standalone_compile", fail)


def test_a_piece_that_cannot_be_compiled_runs_as_its_graph(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise the module; the report has the reason, and a start from the cache tells the same. It compiles nothing,
    for Inductor of this version would fail again."""
    fail_to_compile(monkeypatch, NotImplementedError("no lowering"))
    model = Small()
    with torch.no_grad():
        cold = compiled(model)
        assert torch.equal(cold(inputs()), model(inputs()))
        fail_to_compile(monkeypatch, AssertionError("it compiled"))
        warm = compiled(model)
        assert torch.equal(warm(inputs()), model(inputs()))
    assert (state(cold), state(warm)) == ("miss", "hit")
    for report in (cold.report(), warm.report()):
        assert set(report.eager_pieces.values()) == {"Inductor failed: NotImplementedError: no lowering"}
        assert "runs eagerly: Inductor failed: NotImplementedError: no lowering" in str(report)


def test_strict_makes_it_an_error_cold_and_warm(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_compile(monkeypatch, NotImplementedError("no lowering"))
    for strict in (True, False):
        if strict:
            with pytest.raises(PieceCompileFailed, match="no lowering"):
                compiled(Small(), strict=True)
        else:
            compiled(Small())
    with pytest.raises(PieceCompileFailed, match="no lowering"):
        compiled(Small(), strict=True)


def test_a_failure_that_may_pass_is_not_kept(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at one start: the next one compiles."""
    with monkeypatch.context() as full:
        fail_to_compile(full, OSError(28, "No space left on device"))
        cold = compiled(Small())
    assert "No space left on device" in cold.report().cache.not_stored
    again = compiled(Small())
    assert (state(again), again.report().eager_pieces) == ("miss", {})


class Refuses:
    """An artifact whose first check fails for more than `most_rows` rows."""

    def __init__(self, run: Any, most_rows: int = 1) -> None:
        self.run, self.most_rows = run, most_rows

    def __call__(self, *inputs: Any) -> Any:
        if inputs[0].shape[0] > self.most_rows:
            raise AssertionError("expected size 1")
        return self.run(*inputs)

    def save(self, **options: Any) -> None:
        self.run.save(**options)


def refuse_at_first_run(monkeypatch: pytest.MonkeyPatch, most_rows: int = 1) -> None:
    compile = standalone_compile
    monkeypatch.setattr(inductor, "standalone_compile", lambda *args: Refuses(compile(*args), most_rows))


def test_a_piece_whose_first_run_fails_is_replaced(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it ran at other sizes before; by the next start as well."""
    refuse_at_first_run(monkeypatch)
    model = Small()
    with torch.no_grad():
        cold = compiled(model)
        torch.testing.assert_close(cold(inputs(1)), model(inputs(1)))
        assert cold.report().eager_pieces == {}
        assert torch.equal(cold(inputs(5)), model(inputs(5)))
        told = cold.report().eager_pieces
        assert set(told.values()) == {"its first run failed a check of its own: expected size 1"}
        warm = compiled(model)
        assert (state(warm), warm.report().eager_pieces) == ("hit", told)
        assert torch.equal(warm(inputs(5)), model(inputs(5)))
        other = compiled(Small(num_layers=3), cache="pieces")  # the pieces themselves are as they were compiled
        assert other.report().eager_pieces == {}


def test_a_loaded_piece_is_watched_too(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    compiled(model)
    load = load_files

    def refusing(*args: Any) -> Any:
        done = load(*args)
        return replace(done, run=Refuses(done.run))

    monkeypatch.setattr(piece_store, "load_files", refusing)
    warm = compiled(model)
    with torch.no_grad():
        assert torch.equal(warm(inputs()), model(inputs()))
    assert (state(warm), len(warm.report().eager_pieces)) == ("hit", warm.report().num_unique_pieces)


def test_strict_raises_what_the_piece_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_at_first_run(monkeypatch)
    with pytest.raises(AssertionError, match="expected size 1"):
        compiled(Small(), strict=True, cache=False)(inputs())


def test_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_at_first_run(monkeypatch)
    model = Small()
    options: dict[str, Any] = {"split_ops": ("pgtoy::triple",), "compile_workers": 0, "passes": (), "cache": False}
    torch._dynamo.reset()
    named = torch.compile(model, backend="piecegraph", fullgraph=True, options=options)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(named(inputs()), model(inputs()))
    (found,) = pg.compiled_models(named)
    assert found.report().eager_pieces


def test_by_name_every_new_size_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_at_first_run(monkeypatch, most_rows=5)
    model = Small()
    options: dict[str, Any] = {"split_ops": ("pgtoy::triple",), "compile_workers": 0, "passes": (), "cache": False}
    torch._dynamo.reset()
    named = torch.compile(model, backend="piecegraph", fullgraph=True, dynamic=True, options=options)
    with torch.no_grad():
        for rows in (5, 5, 7, 7, 5):
            torch.testing.assert_close(named(inputs(rows)), model(inputs(rows)))
    (found,) = pg.compiled_models(named)
    assert found.report().eager_pieces


def test_steady_calls_run_the_piece_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watching ends with the first call of some sizes."""
    watched: list[int] = []
    call = WatchedPiece.__call__

    def counted(self: WatchedPiece, *inputs: Any) -> Sequence[Any]:
        watched.append(1)
        return call(self, *inputs)

    monkeypatch.setattr(WatchedPiece, "__call__", counted)
    model = compiled(Small(), cache=False)
    for rows, expected in ((5, 3), (5, 3), (7, 6), (7, 6), (5, 6)):
        model(inputs(rows))
        assert len(watched) <= expected, rows
    assert watched
