"""A replaced or moved weight is never read stale: the next call reads the new one, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.errors import CaptureError, InputMismatch

SIZE = 8
DESCRIPTOR = pg.BatchDescriptor(num_tokens=4)


class Model(nn.Module):
    """Two linears that are merged, one that is not, a buffer, and a weight of two names."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.left, self.right = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.out = nn.Linear(SIZE, SIZE, bias=False)
        self.shift = nn.Buffer(torch.randn(SIZE))
        self.inner, self.head = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(
            self.out(torch.relu(self.left(x)) * self.right(x)) + self.inner(x) + self.shift
        )
        return result


@pytest.fixture(autouse=True)
def no_grad() -> object:
    with torch.no_grad():
        yield


def x(seed: int = 7) -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed))


def compiled(module: nn.Module, **options: object) -> pg.CompiledModel:
    config = pg.CompileConfig(**{"compiler": "eager", "split_ops": (), **options})  # type: ignore[arg-type]  # by name
    return pg.compile(module, config, dynamic_dims={"x": {0: "num_tokens"}}, example_inputs=(x(),))


def graphs_of(model: pg.CompiledModel, mode: str = "FULL") -> tuple[pg.Graphs, list[torch.Tensor]]:
    inputs = [x()]
    return model.capture([DESCRIPTOR], lambda descriptor: inputs, mode=mode), inputs


def move(module: nn.Module, name: str) -> None:
    tensor = module.get_parameter(name)
    tensor.data = torch.randn_like(tensor)


def replace_parameter(module: nn.Module, name: str) -> None:
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    setattr(owner, key, nn.Parameter(torch.randn_like(getattr(owner, key))))


CHANGES: dict[str, Callable[[Model], object]] = {
    "data of one": lambda module: move(module, "out.weight"),
    "data of a merged one": lambda module: move(module, "right.weight"),
    "data of a merged bias": lambda module: move(module, "left.bias"),
    "data of a tied one": lambda module: move(module, "head.weight"),
    "parameter": lambda module: replace_parameter(module, "out.weight"),
    "merged parameter": lambda module: replace_parameter(module, "left.weight"),
    "buffer": lambda module: module.register_buffer("shift", torch.randn(SIZE)),
    "set_": lambda module: give(module.out.weight, torch.randn(SIZE, SIZE)),
    "assigned state": lambda module: module.load_state_dict(Model(1).state_dict(), assign=True),
    "registry": lambda module: module.out._parameters.update(weight=nn.Parameter(torch.randn(SIZE, SIZE))),
    "exchanged memory": lambda module: exchange(module),
    "transposed": lambda module: setattr(module.out.weight, "data", module.out.weight.data.t()),
}
"""Each gives weights values that the pieces do not have, in a way that changing in place is not."""


def give(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Have `tensor` be in the memory of `other`."""
    tensor.set_(other.untyped_storage(), 0, other.shape, other.stride())


def exchange(module: Model) -> None:
    """Two merged weights become each other."""
    left, right = module.left.weight, module.right.weight
    left.data, right.data = right.data, left.data


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_weight_is_seen_or_refused_at_the_next_call(change: Callable[[Model], object]) -> None:
    module = Model()
    model = compiled(module)
    model(x())
    change(module)
    found = None
    with suppress(InputMismatch):
        found = model(x())
    if found is None:
        with pytest.raises(InputMismatch, match="refresh_weights"):
            model(x())
        assert model.refresh_weights() >= 1
        found = model(x())
    torch.testing.assert_close(found, module(x()))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "transposed"])
def test_a_replay_refuses_a_changed_weight_and_a_refresh_adopts_it(name: str, mode: str) -> None:
    """The values are copied into the memory that the graphs read."""
    module = Model()
    model = compiled(module)
    graphs, _ = graphs_of(model, mode)
    torch.testing.assert_close(graphs.replay(DESCRIPTOR), module(x()))
    places = {name: tensor.data_ptr() for name, tensor in model.bound_tensors()}
    CHANGES[name](module)
    wanted = module(x())
    with pytest.raises(CaptureError, match="refresh_weights"):
        graphs.replay(DESCRIPTOR)
    assert model.refresh_weights() >= 1
    torch.testing.assert_close(graphs.replay(DESCRIPTOR), wanted)
    assert {name: tensor.data_ptr() for name, tensor in model.bound_tensors()} == places
    module.get_parameter("out.weight").mul_(2)
    module.get_parameter("left.weight").mul_(2)
    torch.testing.assert_close(graphs.replay(DESCRIPTOR), module(x()))
    assert model.refresh_weights() == 0


def test_another_view_of_its_own_memory_is_refused_by_the_close_check() -> None:
    """Its address is the same, so the cheap check passes it."""
    module = Model()
    graphs = compiled(module).capture([DESCRIPTOR], lambda descriptor: [x()], mode="FULL", check_interval=1)
    graphs.replay(DESCRIPTOR)
    module.out.weight.data = module.out.weight.data.t()
    with pytest.raises(CaptureError, match=r"out\.weight was given other memory"):
        graphs.replay(DESCRIPTOR)


MISFITS: dict[str, tuple[Callable[[Model], object], str]] = {
    "dtype": (lambda module: module.double(), "it has dtype torch.float64; the model was compiled for torch.float32"),
    "shape": (
        lambda module: setattr(module.out, "weight", nn.Parameter(torch.zeros(2, SIZE))),
        r"out\.weight: it has shape \(2, 8\); the model was compiled for \(8, 8\)",
    ),
    "device": (lambda module: module.to("meta"), "it has device meta"),
    "gone": (lambda module: module.out.register_parameter("weight", None), r"out\.weight is missing"),
    "untied": (lambda module: replace_parameter(module, "head.weight"), "was the same tensor as .* has other values"),
    "module": (
        lambda module: setattr(module, "out", nn.Linear(SIZE, SIZE, bias=False)),
        "out is another module, Linea",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS)
def test_a_tensor_that_does_not_fit_is_reported_and_nothing_changes(
    change: Callable[[Model], object], message: str
) -> None:
    module = Model()
    model = compiled(module)
    graphs, _ = graphs_of(model)
    before = graphs.replay(DESCRIPTOR).clone()
    read = {name: tensor.clone() for name, tensor in model.bound_tensors() if "merged" in name or "+" in name}
    change(module)
    with pytest.raises(InputMismatch, match="after the model was compiled"):
        model(x())
    with pytest.raises(CaptureError, match="after the model was compiled"):
        graphs.replay(DESCRIPTOR)
    with pytest.raises(InputMismatch, match=message):
        model.refresh_weights()
    assert all(torch.equal(tensor, dict(model.bound_tensors())[name]) for name, tensor in read.items())
    assert before.shape == (4, SIZE)


def test_without_graphs_nothing_is_copied() -> None:
    """A module may share its parameters' memory with another, as with one that is trained."""
    module, trained = Model(), Model(1)
    model = compiled(module, passes=())
    module.out.weight.data = trained.out.weight.data
    torch.testing.assert_close(model(x()), module(x()))
    trained.out.weight.mul_(3)
    torch.testing.assert_close(model(x()), module(x()))
    module.out.weight = nn.Parameter(trained.left.weight.data)
    assert model.refresh_weights() == 1
    trained.left.weight.mul_(3)
    torch.testing.assert_close(model(x()), module(x()))


def test_closed_graphs_do_not_pin_weights() -> None:
    module = Model()
    model = compiled(module, passes=())
    graphs, _ = graphs_of(model)
    move(module, "out.weight")
    with pytest.raises(InputMismatch, match="given other memory"):
        model(x())
    graphs.close()
    torch.testing.assert_close(model(x()), module(x()))


def test_a_model_from_the_cache_checks_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    options = {"compiler": "inductor", "compile_workers": 0, "cache_dir": str(tmp_path)}
    compiled(Model(), **options)
    module = Model()
    model = compiled(module, **options)
    assert model.report().cache.state == "hit"
    move(module, "left.weight")
    with pytest.raises(InputMismatch, match=r"left\.weight was given other memory"):
        model(x())
    assert model.refresh_weights() == 1
    torch.testing.assert_close(model(x()), module(x()))


def test_a_static_input_that_moved_is_refused_at_the_next_replay() -> None:
    graphs, inputs = graphs_of(compiled(Model()))
    graphs.replay(DESCRIPTOR)
    graphs.replay(DESCRIPTOR)
    give(inputs[0], torch.randn(4, SIZE))
    with pytest.raises(CaptureError, match="input 0 of .* moved"):
        graphs.replay(DESCRIPTOR)


def test_a_model_that_a_step_calls_is_watched_too() -> None:
    """FULL takes any callable: the models in it are those that ran."""
    module = Model()
    model = compiled(module)
    watched = torch.ones(4, SIZE)
    graphs = pg.capture(
        lambda tensor: model(tensor) * watched,
        [DESCRIPTOR],
        lambda descriptor: [x()],
        mode="FULL",
        watched=[("scale", watched)],
    )
    graphs.replay(DESCRIPTOR)
    graphs.replay(DESCRIPTOR)
    move(module, "left.weight")
    with pytest.raises(CaptureError, match=r"left\.weight was given other memory"):
        graphs.replay(DESCRIPTOR)
    model.refresh_weights()
    graphs.replay(DESCRIPTOR)
    give(watched, torch.zeros(4, SIZE))
    with pytest.raises(CaptureError, match="scale moved"):
        graphs.replay(DESCRIPTOR)
