"""Layers are alike when only the values of their tensors, their names and their places differ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph.compiler.repeated_layers.find import find_layer_lists, name_layers


class Layer(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.layer_idx = place
        self.scale = 0.5
        self.zero = 0.0
        self.sizes = (8, [8, 4])
        self.act = functools.partial(nn.functional.gelu, approximate="tanh")
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(map(Layer, range(num_layers)))


def kinds(model: nn.Module) -> list[list[int]]:
    """Return the places of the layers of each kind."""
    (found,) = find_layer_lists(model)
    return [[layer.place for layer in (kind.first, *kind.others)] for kind in found.kinds]


def test_layers_that_differ_in_values_names_and_places_are_alike() -> None:
    model = Model()
    name_layers(model)
    (found,) = find_layer_lists(model)
    (kind,) = found.kinds
    assert (found.name, kind.first.name, kind.places) == ("body.layers", "body.layers.0", {"layer_idx"})
    assert [layer.name for layer, _ in found.layers] == [f"body.layers.{place}" for place in range(5)]
    assert all(of is kind for _, of in found.layers)
    assert (kind.last.place, [layer.place for layer in kind.middle]) == (4, [1, 2, 3])


class Weight(nn.Parameter):
    pass


class Sizes(tuple[Any, ...]):
    pass


def set_on(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, value)


DIFFERENCES: dict[str, Callable[[Any], object]] = {
    "a number": set_on("scale", 0.25),
    "a number of another type": set_on("scale", 1),
    "the sign of a zero": set_on("zero", -0.0),
    "a place of another": set_on("layer_idx", 4),
    "a number in a list": set_on("sizes", (8, [8, 5])),
    "a partial": set_on("act", functools.partial(nn.functional.gelu, approximate="none")),
    "a function": set_on("act", nn.functional.relu),
    "an attribute more": set_on("window", 8),
    "training": lambda layer: layer.eval(),
    "a class": set_on("norm", nn.RMSNorm(8)),
    "a module more": set_on("other", nn.Identity()),
    "a shape": set_on("inner", nn.Linear(8, 4)),
    "a dtype": lambda layer: layer.inner.half(),
    "no bias": set_on("inner", nn.Linear(8, 8, bias=False)),
    "strides": lambda layer: setattr(layer.inner.weight, "data", layer.inner.weight.data.t().contiguous().t()),
    "no gradient": lambda layer: layer.inner.requires_grad_(False),
    "a buffer": lambda layer: layer.register_buffer("table", torch.zeros(3)),
    "a tensor that is no buffer": lambda layer: vars(layer).update(table=torch.zeros(3)),
    "a parameter's attribute": lambda layer: setattr(layer.inner.weight, "gain", 2.0),
    "a parameter of another class": lambda layer: setattr(layer.inner, "weight", Weight(torch.zeros(8, 8))),
    "no module": lambda layer: layer.register_module("inner_too", None),
    "a list of another class": set_on("sizes", Sizes((8, [8, 4]))),
    "a hook": lambda layer: layer.inner.register_forward_hook(lambda *_: None),
    "a forward of its own": set_on("forward", lambda x: x),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_layer_that_differs_in_anything_else_is_another_kind(difference: str) -> None:
    model: Any = Model()
    DIFFERENCES[difference](model.body.layers[2])
    assert kinds(model) == [[0, 1, 3, 4], [2]]


def test_kinds_may_alternate() -> None:
    model: Any = Model(6)
    for place in (1, 3, 5):
        model.body.layers[place].scale = 0.25
    assert kinds(model) == [[0, 2, 4], [1, 3, 5]]


def test_a_list_that_shares_a_module_is_left_out() -> None:
    """A copy would use the tensors of another layer."""
    model: Any = Model()
    model.body.layers.append(model.body.layers[0])
    assert not find_layer_lists(model)
    model = Model()
    model.more = nn.ModuleList([model.body.layers[1]])
    assert not find_layer_lists(model)


def test_a_list_inside_a_layer_is_part_of_the_layer() -> None:
    """Experts are such a list."""
    model: Any = Model()
    for layer in model.body.layers:
        layer.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    assert kinds(model) == [[0, 1, 2, 3, 4]]
    model.body.layers[1].experts.append(nn.Linear(8, 8))
    assert kinds(model) == [[0, 2, 3, 4], [1]]


def test_a_list_without_middle_layers_is_left_out() -> None:
    model: Any = Model(4)
    for place in (1, 2):
        model.body.layers[place].scale = 0.25
    assert not find_layer_lists(model)
    assert not find_layer_lists(nn.Linear(2, 2))


class Slotted(Layer):
    __slots__ = ("hidden",)


def test_layers_with_slots_are_never_alike() -> None:
    """The contents of slots cannot be compared."""
    model: Any = Model()
    model.body.layers = nn.ModuleList(map(Slotted, range(5)))
    assert not find_layer_lists(model)
