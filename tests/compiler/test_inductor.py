"""Inductor pieces: compiled in processes, flat in depth, clear when they fail."""

from __future__ import annotations

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler.compile_pool import CompilePool
from piecegraph.compiler.compile_process import CompileProcess
from piecegraph.errors import ConfigError, PieceCompileFailed
from piecegraph.progress import Phase
from tests.compiler.toy import DIMS, HIDDEN, Decoder, batch


def compiled(num_layers: int = 2, **options: object) -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=("pgtoy::attention",), **options)  # type: ignore[arg-type]  # by name
    return pg.compile(Decoder(num_layers), config, dynamic_dims=DIMS, example_inputs=batch(4))


def test_processes_and_this_process_give_the_same_bits() -> None:
    """The artifact depends on the piece as data, not on where it was compiled."""
    inputs = batch(7, 2)
    here, elsewhere = compiled(compile_workers=0, cache=False), compiled(compile_workers=2, cache=False)
    assert torch.equal(here(*inputs), elsewhere(*inputs))
    kernels = [[row.kernels for row in model.report().unique_pieces] for model in (here, elsewhere)]
    assert kernels[0] == kernels[1]
    assert not any(row.note for row in elsewhere.report().unique_pieces)


def test_depth_adds_no_compiles() -> None:
    """8 or 64 layers: the same unique pieces with the same keys, so the same compiles and nothing more."""
    config = pg.CompileConfig(split_ops=("pgtoy::attention",), compiler="eager", passes=())
    keys = []
    for num_layers in (8, 64):
        model = pg.compile(Decoder(num_layers), config, dynamic_dims=DIMS, example_inputs=batch(4))
        keys.append([row.key for row in model.report().unique_pieces])
    assert keys[0] == keys[1]
    assert len(keys[0]) == 4


def test_progress_counts_unique_pieces() -> None:
    phases: list[Phase] = []
    config = pg.CompileConfig(split_ops=("pgtoy::attention",), compile_workers=2, passes=())
    pg.compile(Decoder(), config, dynamic_dims=DIMS, example_inputs=batch(4), on_phase=phases.append)
    steps = [phase.done for phase in phases if phase.name == "compile" and phase.seconds is None]
    assert steps == [0, 1, 2, 3, 4]
    assert {phase.total for phase in phases if phase.name == "compile"} == {4}


def test_torch_settings_of_the_process_are_left_alone() -> None:
    """Inductor's cache folders are redirected around compile and load, then restored."""
    from piecegraph.environment import read

    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = [read(name) for name in names], torch.get_num_threads(), torch.is_grad_enabled()
    compiled(compile_workers=0, cache=False)
    assert ([read(name) for name in names], torch.get_num_threads(), torch.is_grad_enabled()) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_missing_cxx_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """In a process of ours and in this one; nothing else is blamed."""
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/c++",)}),  # this process read CXX long ago
        pytest.raises(PieceCompileFailed, match=r"Install a C\+\+ compiler .* or name one in CXX"),
    ):
        compiled(compile_workers=workers, cache=False)


def test_unknown_inductor_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'max_autotun', which is no .* field. Did you mean 'max_autotune'\?"):
        compiled(inductor_options={"max_autotun": True})


def test_a_compile_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child killed from outside (no memory, say): the status it ended with, not a hang."""
    feed = CompilePool._feed

    def kill_then_feed(self: CompilePool, child: CompileProcess) -> None:
        child.process.kill()
        feed(self, child)

    monkeypatch.setattr(CompilePool, "_feed", kill_then_feed)
    with pytest.raises(PieceCompileFailed, match="the compile process ended with status -9"):
        compiled(compile_workers=2, cache=False)


def test_static_and_dynamic_sizes_share_no_piece() -> None:
    """Without dynamic_dims everything is fixed, and a call of another size says how to free it."""
    module = torch.nn.Linear(HIDDEN, HIDDEN)
    fixed = pg.compile(module, example_inputs=(torch.ones(3, HIDDEN),))
    free = pg.compile(module, dynamic_dims={"input": 0}, example_inputs=(torch.ones(3, HIDDEN),))
    assert fixed.report().unique_pieces[0].key != free.report().unique_pieces[0].key
    with pytest.raises(pg.errors.InputMismatch, match="Declare dim 0 in dynamic_dims if it varies"):
        fixed(torch.ones(4, HIDDEN))
    assert free(torch.ones(4, HIDDEN)).shape == (4, HIDDEN)


def test_close_ends_the_processes() -> None:
    from piecegraph.compiler.inductor import InductorPieceCompiler

    compiler = InductorPieceCompiler({}, 2)
    compiler.start()
    assert compiler._pool is not None
    children = list(compiler._pool._children)
    compiler.close()
    compiler.close()
    assert children
    assert all(child.process.poll() is not None for child in children)
