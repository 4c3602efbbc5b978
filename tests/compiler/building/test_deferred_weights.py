"""A module is traced over fake tensors, and runs with weights that load while its pieces compile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import piecegraph
from piecegraph import CompileConfig
from piecegraph.compiler.building.inductor_pieces import InductorPieceCompiler
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.errors import InputMismatch
from piecegraph.progress import Phase
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch


class Biased(nn.Module):
    """A decoder with a buffer, two projections of one input, and a result that is one of its own tensors."""

    def __init__(self, seed: int = 0, scale: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = Decoder(1, seed)
        self.up = nn.Linear(32, 8, bias=False)
        self.gate = nn.Linear(32, 8, bias=False)
        self.register_buffer("shift", torch.randn(8))
        self.scale = scale

    def forward(self, input_ids: torch.Tensor, logits_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.inner(input_ids, logits_indices)
        return self.up(logits) * self.gate(logits) * self.scale + self.get_buffer("shift"), self.get_buffer("shift")


def fake(make: Callable[[], nn.Module]) -> nn.Module:
    with FakeTensorMode():
        return make().eval().requires_grad_(False)


class Loading:
    """Loads a module with weights, and remembers what had been told of by then."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.make = make
        self.modules: list[nn.Module] = []
        self.phases: list[Phase] = []
        self.before: list[Phase] = []

    def __call__(self) -> nn.Module:
        self.before = list(self.phases)
        self.modules.append(self.make().eval().requires_grad_(False))
        return self.modules[-1]

    def compile(self, module: nn.Module, config: CompileConfig) -> CompiledModel:
        with torch.no_grad():
            return piecegraph.compile(
                module,
                config,
                dynamic_dims=DIMS,
                example_inputs=batch(5),
                on_phase=self.phases.append,
                load_weights=self,
            )


@pytest.fixture(autouse=True)
def cache_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")


def config(folder: Path, workers: int = 1, **options: Any) -> CompileConfig:
    return CompileConfig(split_ops=SPLIT_OPS, cache_dir=str(folder), compile_workers=workers, **options)


def check_runs(model: CompiledModel, module: nn.Module) -> None:
    for num_tokens in (1, 5, 9):
        inputs = batch(num_tokens, 2)
        expected, found = module(*inputs), model(*inputs)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] is module.get_buffer("shift")


@pytest.mark.slow
def test_weights_load_while_pieces_compile(tmp_path: Path) -> None:
    """They load once, after the first job was queued and before any is done; merged parameters are merged in them."""
    loading = Loading(Biased)
    model = loading.compile(fake(Biased), config(tmp_path, workers=2))
    (module,) = loading.modules
    assert [phase.name for phase in loading.before][-1] == "compile"
    assert not any(phase.name == "compile" and phase.done for phase in loading.before)
    check_runs(model, module)
    merged = {name: tensor for name, tensor in model.bound_tensors() if "up" in name}
    assert len(merged) == 1
    up, gate = module.get_parameter("up.weight"), module.get_parameter("gate.weight")
    assert {up.untyped_storage().data_ptr(), gate.untyped_storage().data_ptr()} == {
        tensor.untyped_storage().data_ptr() for tensor in merged.values()
    }
    report = model.report()
    assert (report.cache.state, report.cache.not_stored, report.weights_first) == ("miss", "", "")


def test_a_cached_model_is_bound_to_loaded_weights(tmp_path: Path) -> None:
    """Nothing is traced; compiles with and without deferred weights share their entries."""
    first = Loading(Biased)
    cold = first.compile(fake(Biased), config(tmp_path))
    again = Loading(lambda: Biased(seed=1))
    warm = again.compile(fake(Biased), config(tmp_path))
    assert warm.report().cache.state == "hit"
    assert "trace" not in {phase.name for phase in again.phases}
    assert len(again.modules) == 1
    check_runs(warm, again.modules[0])
    with torch.no_grad():
        plain = piecegraph.compile(
            Biased(seed=2).eval().requires_grad_(False),
            config(tmp_path),
            dynamic_dims=DIMS,
            example_inputs=batch(5),
        )
    assert plain.report().cache.state == "hit"
    assert plain.source == cold.source


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_weights_load_without_child_processes(tmp_path: Path, compiler: str) -> None:
    loading = Loading(Biased)
    model = loading.compile(fake(Biased), config(tmp_path, compiler=compiler, cache=False))
    (module,) = loading.modules
    check_runs(model, module)


def test_loaded_weights_of_another_model_are_traced_again(tmp_path: Path) -> None:
    """A scalar that differs is in the graph: the model that was loaded decides, and the report says so."""
    loading = Loading(lambda: Biased(scale=3.0))
    model = loading.compile(fake(Biased), config(tmp_path, compiler="eager"))
    (module,) = loading.modules
    check_runs(model, module)
    assert "scale" in model.report().weights_first
    assert "2.0" in model.report().weights_first
    assert "3.0" in model.report().weights_first


def test_a_model_without_a_key_loads_its_weights_first(tmp_path: Path) -> None:
    def make() -> nn.Module:
        module = Biased()
        vars(module)["stream"] = memoryview(b"")
        return module

    loading = Loading(make)
    model = loading.compile(fake(make), config(tmp_path, compiler="eager"))
    check_runs(model, loading.modules[0])
    assert "stream is a builtins.memoryview" in model.report().weights_first
    assert "trace" not in {phase.name for phase in loading.before}


class Tabled(Biased):
    """Has a tensor that is neither parameter nor buffer: fake where its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.get_buffer("shift") * 2

    def forward(self, input_ids: torch.Tensor, logits_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, shift = super().forward(input_ids, logits_indices)
        return result + self.table, shift


MADE: dict[str, torch.Tensor] = {}


class Elsewhere(Biased):
    """Keeps what it made of its weights where no key looks."""

    def __init__(self) -> None:
        super().__init__()
        MADE["table"] = self.get_buffer("shift") * 2

    def forward(self, input_ids: torch.Tensor, logits_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, shift = super().forward(input_ids, logits_indices)
        return result + MADE["table"], shift


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Tabled, "table is a tensor of 32 bytes that is neither"),
        (Elsewhere, "is computed from weights and became a constant"),
    ],
)
def test_a_constant_without_values_is_traced_again_with_weights(make: type[Biased], why: str, tmp_path: Path) -> None:
    """The loaded module is traced unchanged: none of its parameters is merged before."""
    loading = Loading(make)
    model = loading.compile(fake(make), config(tmp_path))
    (module,) = loading.modules
    check_runs(model, module)
    assert why in model.report().weights_first
    plain = Loading(make)
    again = plain.compile(make().eval().requires_grad_(False), config(tmp_path))
    assert again.report().cache.key == model.report().cache.key


def test_an_error_of_loading_propagates_and_ends_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[InductorPieceCompiler] = []
    close = InductorPieceCompiler.close

    def closing(compiler: InductorPieceCompiler) -> None:
        close(compiler)
        closed.append(compiler)

    monkeypatch.setattr(InductorPieceCompiler, "close", closing)

    def fail() -> nn.Module:
        raise FileNotFoundError("no weights")

    loading = Loading(fail)
    with pytest.raises(FileNotFoundError, match="no weights"):
        loading.compile(fake(Biased), config(tmp_path, workers=2))
    assert len(closed) == 1
    assert closed[0]._pool is None


def test_close_releases_the_weights(tmp_path: Path) -> None:
    """The loader, which may hold the weights, is released too."""
    loading = Loading(Biased)
    model = loading.compile(fake(Biased), config(tmp_path, compiler="eager"))
    weight = weakref.ref(loading.modules[0].get_parameter("up.weight"))
    seen = weakref.ref(loading)
    del loading
    model.close()
    gc.collect()
    assert seen() is None
    assert weight() is None


def test_a_parameter_that_is_replaced_later_is_detected(tmp_path: Path) -> None:
    loading = Loading(Biased)
    model = loading.compile(fake(Biased), config(tmp_path, compiler="eager"))
    (module,) = loading.modules
    module.register_buffer("shift", torch.zeros(8))
    with pytest.raises(InputMismatch, match="shift was replaced"):
        model(*batch(3))
