"""Inductor pieces: compiled in processes, flat in depth, clear when they fail."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.cache.store.single_flight import Flights
from piecegraph.cache.store.store import Loaded, Saved, Store
from piecegraph.compiler.workers.pool import CompilePool
from piecegraph.compiler.workers.process import CompileProcess
from piecegraph.errors import ConfigError, PieceCompileFailed
from piecegraph.progress import OnPhase, Phase
from tests.compiler.toy import DIMS, HIDDEN, Decoder, batch
from tests.compiler.user_passes import ReluToPython


def compiled(num_layers: int = 2, **options: object) -> pg.CompiledModel:
    """A decoder, compiled in this process unless `compile_workers` says otherwise."""
    given: dict[str, Any] = {"split_ops": ("pgtoy::attention",), "compile_workers": 0, **options}
    config = pg.CompileConfig(**given)
    return pg.compile(Decoder(num_layers), config, dynamic_dims=DIMS, example_inputs=batch(4))


@pytest.mark.slow
def test_processes_and_this_process_give_the_same_bits() -> None:
    """The artifact depends on the piece as data, not on where it was compiled."""
    inputs = batch(7, 2)
    here, elsewhere = compiled(compile_workers=0, cache=False), compiled(compile_workers=2, cache=False)
    assert torch.equal(here(*inputs), elsewhere(*inputs))
    kernels = [[row.kernels for row in model.report().unique_pieces] for model in (here, elsewhere)]
    assert kernels[0] == kernels[1]
    assert not any(row.note for row in elsewhere.report().unique_pieces)


@pytest.mark.slow
def test_depth_adds_no_compiles() -> None:
    """8 or 32 layers: the same unique pieces with the same keys, so the same compiles and nothing more."""
    config = pg.CompileConfig(split_ops=("pgtoy::attention",), compiler="eager", passes=())
    keys = []
    for num_layers in (8, 32):
        model = pg.compile(Decoder(num_layers), config, dynamic_dims=DIMS, example_inputs=batch(4))
        keys.append([row.key for row in model.report().unique_pieces])
    assert keys[0] == keys[1]
    assert len(keys[0]) == 4


@pytest.mark.slow
def test_progress_counts_unique_pieces() -> None:
    phases: list[Phase] = []
    config = pg.CompileConfig(split_ops=("pgtoy::attention",), compile_workers=0, passes=())
    pg.compile(Decoder(), config, dynamic_dims=DIMS, example_inputs=batch(4), on_phase=phases.append)
    steps = [phase.done for phase in phases if phase.name == "compile" and phase.seconds is None]
    assert steps == [0, 1, 2, 3, 4]
    assert {phase.total for phase in phases if phase.name == "compile"} == {4}


@pytest.mark.slow
def test_torch_settings_of_the_process_are_left_alone() -> None:
    """Inductor's cache folders are redirected around compile and load, then restored."""
    from piecegraph.environment import read

    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = [read(name) for name in names], torch.get_num_threads(), torch.is_grad_enabled()
    compiled(compile_workers=0, cache=False)
    assert ([read(name) for name in names], torch.get_num_threads(), torch.is_grad_enabled()) == before


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_missing_cxx_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """In a process of ours and in this one; nothing else is blamed. Without `strict` the model runs, and is told why
    it runs eagerly."""
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/c++",)}),  # this process read CXX long ago
    ):
        with pytest.raises(PieceCompileFailed, match=r"Install a C\+\+ compiler .* or name one in CXX"):
            compiled(compile_workers=workers, cache=False, strict=True)
        reasons = compiled(compile_workers=workers, cache=False).report().eager_pieces
    assert len(reasons) == 3
    assert all("Install a C++ compiler" in reason for reason in reasons.values())


def test_unknown_inductor_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'max_autotun', which is not a field .*Did you mean 'max_autotune'\?"):
        compiled(inductor_options={"max_autotun": True})


def test_a_compile_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is killed, for example for memory, gives an error with its exit status and no hang."""
    feed = CompilePool._feed

    def kill_then_feed(self: CompilePool, child: CompileProcess) -> None:
        child.process.kill()
        feed(self, child)

    monkeypatch.setattr(CompilePool, "_feed", kill_then_feed)
    with pytest.raises(PieceCompileFailed, match="the compile process ended with status -9"):
        compiled(compile_workers=2, cache=False, strict=True)


def test_a_piece_that_torch_cannot_save_runs_compiled() -> None:
    """A process cannot hand it over, so this process compiles it; the report names what it calls."""

    class Relu(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + 1

    config = pg.CompileConfig(compile_workers=2, passes=(ReluToPython(),))
    x = torch.randn(3, 4)
    model = pg.compile(Relu(), config, dynamic_dims={"x": 0}, example_inputs=(x,))
    report = model.report()
    assert torch.equal(model(x), torch.relu(x) + 1)
    assert not report.eager_pieces
    note = r"compiled in this process: torch cannot save the compiled piece \(Unsupported call_function .*relu>\)"
    assert re.fullmatch(note, report.unique_pieces[0].note)
    assert report.unique_pieces[0].kernels == 1
    assert "torch cannot save it" in report.cache.not_stored


def test_static_and_dynamic_sizes_share_no_piece() -> None:
    """Without dynamic_dims everything is fixed, and a call of another size says how to free it."""
    module = torch.nn.Linear(HIDDEN, HIDDEN)
    config = pg.CompileConfig(compile_workers=0)
    fixed = pg.compile(module, config, example_inputs=(torch.ones(3, HIDDEN),))
    free = pg.compile(module, config, dynamic_dims={"input": 0}, example_inputs=(torch.ones(3, HIDDEN),))
    assert fixed.report().unique_pieces[0].key != free.report().unique_pieces[0].key
    with pytest.raises(pg.errors.InputMismatch, match="Declare dim 0 in dynamic_dims if it varies"):
        fixed(torch.ones(4, HIDDEN))
    assert free(torch.ones(4, HIDDEN)).shape == (4, HIDDEN)


def test_close_ends_the_processes() -> None:
    from piecegraph.compiler.building.inductor_pieces import InductorPieceCompiler

    compiler = InductorPieceCompiler({}, 2)
    compiler.start()
    assert compiler._pool is not None
    children = list(compiler._pool._children)
    compiler.close()
    compiler.close()
    assert children
    assert all(child.process.poll() is not None for child in children)


def with_pieces_kept(root: Path, on_phase: OnPhase | None = None) -> pg.CompiledModel:
    config = pg.CompileConfig(
        split_ops=("pgtoy::attention",), compile_workers=0, cache="pieces", cache_dir=str(root), passes=()
    )
    return pg.compile(Decoder(1), config, dynamic_dims=DIMS, example_inputs=batch(4), on_phase=on_phase)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the pieces of the model."""
    root = tmp_path_factory.mktemp("filled")
    assert with_pieces_kept(root).report().cache.loaded_pieces == 0
    return root


@pytest.mark.slow
def test_a_killed_start_leaves_its_compiled_pieces(tmp_path: Path) -> None:
    """Each piece is stored as soon as it is compiled, and its lock is free."""

    def dies(phase: Phase) -> None:
        if phase.name == "compile" and phase.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_pieces_kept(tmp_path / "cache", dies)
    assert len(Store.open(tmp_path / "cache").list()) == 2
    assert list((tmp_path / "cache" / "v1" / "locks").iterdir()) == []
    assert with_pieces_kept(tmp_path / "cache").report().cache.loaded_pieces == 2


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["stored", "killed"])
def test_a_piece_that_another_process_compiles_is_waited_for(tmp_path: Path, filled: Path, ends: str) -> None:
    """Without a plan's key too. What is not being compiled elsewhere is compiled meanwhile; in the end each piece was
    compiled once, or, where the other was killed, here."""
    there, here = Store.open(filled), Store.open(tmp_path / "cache")
    pieces = [
        row.key for row in there.list() if row.file.entry is not None and row.file.entry.factors["kind"] == "piece"
    ]
    assert here.prepare()
    other = Flights(here.layout)
    assert other.take(pieces[0])
    stored = threading.Event()

    def end() -> None:
        while len(here.list()) < len(pieces) - 1:
            time.sleep(0.01)
        if ends == "stored":
            found = there.load(pieces[0])
            assert isinstance(found, Loaded)
            assert isinstance(here.save(found.entry, found.blobs), Saved)
        stored.set()
        other.close()

    thread = threading.Thread(target=end)
    thread.start()
    report = with_pieces_kept(tmp_path / "cache").report()
    thread.join()
    assert stored.is_set()
    assert report.cache.loaded_pieces == (1 if ends == "stored" else 0)
    assert {row.key for row in here.list()} >= set(pieces)
    assert list(here.layout.locks.iterdir()) == []
