"""Find the layers of a model that are alike, before any of it is traced.

Two layers are alike when they consist of the same classes at the same places, with equal attributes and with tensors
of the same shape, dtype, strides and device. Attributes that identify a layer may differ: its name, and numbers that
are its place in the list.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor

NAME_ATTRIBUTE = "_piecegraph_layer"
"""The attribute that holds a module's name in its model. Code that is traced may hand that name to an op, and do
nothing else with it."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(name for name in _OF_EVERY_MODULE if name.endswith("_hooks") and "state_dict" not in name)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer in a list of layers."""

    name: str  # in the model
    place: int  # in the list
    module: nn.Module


@dataclass(slots=True)
class LayerKind:
    """Layers of one list that are alike, in the order of the list."""

    first: Layer
    others: list[Layer] = field(default_factory=list)
    places: set[str] = field(default_factory=set)  # attributes that hold a layer's place

    @property
    def layers(self) -> list[Layer]:
        """All layers of this kind, in order."""
        return [self.first, *self.others]

    @property
    def last(self) -> Layer:
        """The last layer of this kind."""
        return self.layers[-1]

    @property
    def middle(self) -> list[Layer]:
        """The layers that are neither the first nor the last."""
        return self.others[:-1]


@dataclass(frozen=True, slots=True)
class LayerList:
    """A list of layers, sorted into kinds; a kind may have one layer."""

    name: str
    kinds: tuple[LayerKind, ...]

    @property
    def layers(self) -> list[tuple[Layer, LayerKind]]:
        """The layers in the order of the list, each with its kind."""
        pairs = [(layer, kind) for kind in self.kinds for layer in kind.layers]
        return sorted(pairs, key=lambda pair: pair[0].place)


def name_layers(model: nn.Module) -> None:
    """Set `NAME_ATTRIBUTE` of every module in `model` to the module's name there."""
    for name, module in model.named_modules():
        setattr(module, NAME_ATTRIBUTE, name)


def find_layer_lists(model: nn.Module) -> tuple[LayerList, ...]:
    """Return the outermost lists in `model` in which more than two layers are alike.

    A list is left out if one of its modules occurs more than once in such lists.
    """
    lists = list(_outermost_lists(model, ""))
    times = Counter(id(module) for _, layers in lists for module in layers)
    found = []
    for name, layers in lists:
        if any(times[id(module)] > 1 for module in layers):
            continue
        kinds: list[LayerKind] = []
        for place, child in enumerate(layers):
            _sort_in(Layer(f"{name}.{place}" if name else str(place), place, child), kinds)
        if any(kind.middle for kind in kinds):
            found.append(LayerList(name, tuple(kinds)))
    return tuple(found)


def _outermost_lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList):
            yield full, child
        else:
            yield from _outermost_lists(child, full)


def _sort_in(layer: Layer, kinds: list[LayerKind]) -> None:
    for kind in kinds:
        places = _places_if_alike(kind.first, layer)
        if places is not None:
            kind.others.append(layer)
            kind.places |= places
            return
    kinds.append(LayerKind(layer))


def _places_if_alike(one: Layer, other: Layer) -> set[str] | None:
    """Return the attributes that hold the place of each layer in its list; None where the two are not alike."""
    places: set[str] = set()
    left, right = (dict(each.module.named_modules(remove_duplicate=False)) for each in (one, other))
    if one.module is other.module or list(left) != list(right):
        return None
    for a, b in zip(left.values(), right.values(), strict=True):
        if type(a) is not type(b) or _has_slots(type(a)) or not _same_tensors(a, b):
            return None
        if [(name, each is None) for name, each in a._modules.items()] != [
            (name, each is None) for name, each in b._modules.items()
        ]:
            return None
        if any(vars(each)[hooks] for each in (a, b) for hooks in _HOOKS) or "forward" in {**vars(a), **vars(b)}:
            return None
        ours, theirs = _attributes(a), _attributes(b)
        if list(ours) != list(theirs):
            return None
        for key, value in ours.items():
            if _same(value, theirs[key]):
                continue
            if type(value) is not int or (value, theirs[key]) != (one.place, other.place):
                return None
            places.add(key)
    return places


def _attributes(module: nn.Module) -> Mapping[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE and key != NAME_ATTRIBUTE}


def _has_slots(kind: type) -> bool:
    """Return whether a class has slots, which `vars` does not show."""
    return any(set(vars(each).get("__slots__", ())) - {"__dict__", "__weakref__"} for each in kind.__mro__)


def _same_tensors(a: nn.Module, b: nn.Module) -> bool:
    return all(
        list(left) == list(right) and all(map(_same_kind_of_tensor, left.values(), right.values()))
        for left, right in ((a._parameters, b._parameters), (a._buffers, b._buffers))
    )


def _same_kind_of_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or a.layout is not torch.strided:
        return a is b
    return (
        type(a) is type(b)
        and (isinstance(a, FakeTensor) or _same(vars(a), vars(b)))
        and all(
            getattr(a, name) == getattr(b, name) for name in ("shape", "dtype", "device", "layout", "requires_grad")
        )
        and (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
    )


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PLAIN):
        return repr(a) == repr(b)  # 0.0 is not -0.0
    if type(a) is functools.partial:
        return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a) is dict:
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    return False
