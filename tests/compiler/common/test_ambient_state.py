"""The state around a call that the trace relied on is compared at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.torch_compat.process_settings import apply_process_settings, process_settings
from piecegraph.errors import InputMismatch

X = torch.randn(3, 8)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def compiled(compiler: str = "eager") -> tuple[pg.CompiledModel, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).requires_grad_(False)
    config = pg.CompileConfig(compiler=compiler, passes=(), cache=False, compile_workers=0)
    return pg.compile(module, config, dynamic_dims={"input": 0}, example_inputs=(X,)), module


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (autocast, "called under torch.autocast.*compiled without autocast"),
        (default_dtype, "default dtype is torch.float64; it was torch.float32"),
        (deterministic, "are_deterministic_algorithms_enabled.. is True; it was False"),
    ],
)
def test_another_state_is_refused(state: Callable[[], AbstractContextManager[object]], message: str) -> None:
    model, _ = compiled()
    with state(), pytest.raises(InputMismatch, match=message):
        model(X)
    assert model(X).dtype == torch.float32


def test_a_transform_is_refused() -> None:
    model, _ = compiled()
    with pytest.raises(InputMismatch, match="transform of torch.func"):
        torch.vmap(model)(X[None])


def test_a_model_compiled_under_autocast_is_called_under_it() -> None:
    with autocast():
        model, module = compiled()
        assert torch.equal(model(X), module(X))
        assert model(X).dtype == torch.bfloat16
    with pytest.raises(InputMismatch, match="called without autocast; it was compiled under torch.autocast"):
        model(X)


def test_autocast_of_another_device_is_ignored() -> None:
    model, module = compiled()
    with torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else nullcontext():
        assert torch.equal(model(X), module(X))


def test_compile_processes_have_the_casts() -> None:
    with autocast():
        settings = process_settings()
        apply_process_settings({**settings, "autocast": {}})
        assert not torch.is_autocast_enabled("cpu")
        apply_process_settings(settings)
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_inductor_pieces_have_the_casts() -> None:
    """The pieces are compiled in another process, as by default."""
    with autocast():
        model, module = compiled("inductor")
        assert model(X).dtype == torch.bfloat16
        torch.testing.assert_close(model(X), module(X), rtol=0.02, atol=0.02)
