"""The module's parameters and buffers that compiled pieces read: detecting changes and adopting new values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any

import torch

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor
from piecegraph.compiler.tracing.signature import BoundInput
from piecegraph.errors import InputMismatch

ALIGNMENT = 16
"""Bytes. Kernels assume an address that is a multiple of `ALIGNMENT` if the bound address was one."""

MOST_NAMED = 5
"""The number of tensors that an error names before it counts the rest."""

ADVICE = "Call refresh_weights() to take new values over, change values in place (tensor.copy_), or compile again."

_address = torch.Tensor.data_ptr


@dataclass(slots=True)
class _Place:
    """A place where the module has a tensor."""

    registry: dict[str, Any]  # a module's parameters or its buffers
    key: str
    path: str
    held: torch.Tensor  # the tensor there at the last check

    @property
    def found(self) -> Any:
        return self.registry.get(self.key)


@dataclass(slots=True)
class _Weight:
    """A tensor that pieces read, with every name that the module has for it."""

    places: list[_Place]
    memory: torch.Tensor  # an alias of the tensor that pieces read, which keeps its memory alive
    read: torch.Tensor | None  # the object that pieces read; None: pieces read a larger, merged tensor

    @property
    def name(self) -> str:
        return self.places[0].path

    def is_bound_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` has the bound address, strides, shape, dtype and device."""
        same = tensor.data_ptr() == self.memory.data_ptr() and tensor.stride() == self.memory.stride()
        return same and self.misfit(tensor) == ""

    def misfit(self, tensor: torch.Tensor) -> str:
        """Return why `tensor` cannot replace the bound tensor: a wrong shape, dtype or device; "" if it can."""
        for what in ("shape", "dtype", "device"):
            found, wanted = getattr(tensor, what), getattr(self.memory, what)
            if found != wanted:
                found, wanted = (tuple(each) if what == "shape" else each for each in (found, wanted))
                return f"it has {what} {found}; the model was compiled for {wanted}"
        return ""

    def can_read_in_place(self, tensor: torch.Tensor) -> bool:
        """Return whether pieces can read the memory of `tensor`: its strides and alignment are the bound ones."""
        offset = tensor.data_ptr() % ALIGNMENT
        return tensor.stride() == self.memory.stride() and offset in (0, self.memory.data_ptr() % ALIGNMENT)


class BoundWeights:
    """The parameters and buffers bound at compile time, with their places in the module.

    `bound` holds the parameters and buffers of `module` one by one; `read` holds the tensors that pieces receive. A
    parameter of `bound` that is not in `read` was merged with others into a tensor of `read` and is a view of it.

    This object keeps the bound memory alive even after the module has released it, so that no graph reads memory that
    was reused for another tensor.
    """

    def __init__(self, module: torch.nn.Module, bound: Iterable[BoundInput], read: Iterable[Any]) -> None:
        reads = {id(tensor) for tensor in read}
        wanted = {id(each.tensor): each.tensor for each in bound if each.kind in ("parameter", "buffer")}
        places, self._modules = _places_of(module, wanted)
        self._weights = [
            _Weight(found, _alias(wanted[key]), wanted[key] if key in reads else None) for key, found in places.items()
        ]
        self._num_pins = 0
        self._update_lists()

    @property
    def is_pinned(self) -> bool:
        """True if graphs were captured over the bound addresses."""
        return self._num_pins > 0

    def pin(self) -> None:
        """Make `refresh` copy values into the bound memory, until `unpin` was called as often as `pin`."""
        self._num_pins += 1

    def unpin(self) -> None:
        """Undo one call of `pin`."""
        self._num_pins -= 1

    def move(self, move: Callable[[Sequence[torch.Tensor]], None], read: Iterable[torch.Tensor]) -> None:
        """Call `move` with every tensor of the weights and every one of `read`, which it makes views of other memory.

        The objects, their values, shapes and strides must stay. No graph may have been captured.
        """
        assert not self.is_pinned, "graphs were captured over the bound addresses"
        own = [tensor for weight in self._weights for tensor in (weight.memory, *(p.held for p in weight.places))]
        move([tensor for tensor in (*own, *read) if not isinstance(tensor, FakeTensor)])
        self._update_lists()

    def are_unchanged(self) -> bool:
        """Return whether the module still has the bound tensors at the bound addresses.

        The check is cheap enough for every step: three loops in C. It does not notice a tensor that became another
        view of its own memory.
        """
        try:
            return (
                all(map(is_, map(getitem, self._registries, self._keys), self._held))
                and list(map(_address, self._tensors)) == self._addresses
            )
        except KeyError:  # a tensor or module was removed
            return False

    def describe_changes(self) -> str:
        """Return which tensors are not the bound ones and what to do about it; "" if nothing changed."""
        found = [
            f"{path} was replaced by another module"
            for registry, key, path, child in self._modules
            if registry.get(key) is not child
        ]
        for weight, place in self._each_place():
            tensor = place.found
            if tensor is not place.held:
                found.append(f"{place.path} was {'removed' if tensor is None else 'replaced'}")
            elif not weight.is_bound_memory(tensor):
                found.append(f"{place.path} was given other memory{_and(weight.misfit(tensor))}")
        if not found:
            return ""
        return f"{_listed(found)} after the model was compiled; the compiled pieces still read the old values. {ADVICE}"

    def follow_moved_memory(self) -> None:
        """Make pieces read the memory that was assigned to parameters (`parameter.data = ...`).

        This is possible where no graph was captured, the parameter was not merged with others, and the new memory has
        the bound shape, dtype, device, strides and alignment. Raises `InputMismatch`, with nothing changed, for any
        other change.
        """
        moved = [weight for weight in self._weights if not weight.is_bound_memory(weight.places[0].held)]
        in_place = all(registry.get(key) is child for registry, key, _, child in self._modules) and all(
            place.found is place.held for _, place in self._each_place()
        )
        can_move = not self.is_pinned and all(
            weight.read is not None
            and len({id(place.held) for place in weight.places}) == 1
            and not weight.misfit(weight.places[0].held)
            and weight.can_read_in_place(weight.places[0].held)
            for weight in moved
        )
        if not in_place or not can_move:
            raise InputMismatch(self.describe_changes())
        for weight in moved:
            _rebind(weight, weight.places[0].held.data)
        self._update_lists()

    def refresh(self) -> int:
        """Adopt the values of every tensor that was replaced or given other memory; return the number of tensors.

        Where graphs were captured, or several parameters are stored as one, values are copied into the bound memory,
        and the module's tensors become views of it. Otherwise pieces read the new tensors from now on.

        Raises `InputMismatch`, with nothing changed, for a tensor that is missing or of another shape, dtype or device,
        for two names of one tensor whose values now differ, and for a module that was replaced.
        """
        problems = [
            f"{path} is another module, {type(registry.get(key)).__name__}, which was not compiled"
            for registry, key, path, child in self._modules
            if registry.get(key) is not child
        ]
        changed = [weight for weight in self._weights if not self._is_unchanged(weight)]
        for weight in changed:
            problems += _problems_of(weight)
        if problems:
            raise InputMismatch(
                f"the weights cannot be adopted: {_listed(problems)}. Assign tensors like those that were compiled, or "
                "compile the module again."
            )
        own = {weight.memory.untyped_storage().data_ptr() for weight in self._weights}
        with torch.no_grad():
            values = [
                _value_of(weight, own) for weight in changed
            ]  # before any write: new values may lie in bound memory
            for weight, value in zip(changed, values, strict=True):
                if self.is_pinned or weight.read is None:
                    weight.memory.copy_(value)
                    _move(weight, weight.memory)
                else:
                    _rebind(weight, value)
        self._update_lists()
        return len(changed)

    def _is_unchanged(self, weight: _Weight) -> bool:
        return all(place.found is place.held and weight.is_bound_memory(place.held) for place in weight.places)

    def _each_place(self) -> Iterator[tuple[_Weight, _Place]]:
        return ((weight, place) for weight in self._weights for place in weight.places)

    def _update_lists(self) -> None:
        """Rebuild the lists that `are_unchanged` compares."""
        places = [place for _, place in self._each_place()]
        self._registries = [*(place.registry for place in places), *(each[0] for each in self._modules)]
        self._keys = [*(place.key for place in places), *(each[1] for each in self._modules)]
        self._held: list[Any] = [*(place.held for place in places), *(each[3] for each in self._modules)]
        homes = {id(place.held): (place.held, weight.memory) for weight, place in self._each_place()}
        real = [home for home in homes.values() if not isinstance(home[0], FakeTensor)]
        self._tensors = [held for held, _ in real]
        self._addresses = [memory.data_ptr() for _, memory in real]


_ModulePlace = tuple[dict[str, Any], str, str, torch.nn.Module]
"""The registry of a module's children, the name of a child, its path, and the child."""


def _places_of(
    module: torch.nn.Module, wanted: dict[int, torch.Tensor]
) -> tuple[dict[int, list[_Place]], list[_ModulePlace]]:
    """Return the places in `module` of the tensors `wanted`, by id, and the modules on the paths to them."""
    places: dict[int, list[_Place]] = {}
    owners: dict[str, None] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        for registry in (each._parameters, each._buffers):
            for key, tensor in registry.items():
                if id(tensor) in wanted:
                    held: Any = tensor
                    name = f"{path}.{key}" if path else key
                    places.setdefault(id(tensor), []).append(_Place(registry, key, name, held))
                    owners[path] = None
    ways: dict[str, _ModulePlace] = {}
    for owner in owners:
        parent, path = module, ""
        for key in owner.split(".") if owner else ():
            path = f"{path}.{key}" if path else key
            child: Any = parent._modules[key]
            ways[path] = (parent._modules, key, path, child)
            parent = child
    return places, list(ways.values())


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    with torch.inference_mode(False):
        return tensor.detach()


def _problems_of(weight: _Weight) -> list[str]:
    """Return why the module's tensors cannot be adopted for `weight`."""
    for place in weight.places:
        if not isinstance(place.found, torch.Tensor):
            return [f"{place.path} is missing"]
        if weight.misfit(place.found):
            return [f"{place.path}: {weight.misfit(place.found)}"]
        if place.found.is_inference():
            return [f"{place.path} was made in inference_mode, so its memory cannot be replaced"]
    first, *others = (place.found for place in weight.places)
    for place, other in zip(weight.places[1:], others, strict=True):
        if not (other is first or _is_same_memory(other, first) or torch.equal(other, first)):
            return [f"{place.path} was the same tensor as {weight.name} and has other values now"]
    return []


def _is_same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.stride() == right.stride()


def _value_of(weight: _Weight, own: set[int]) -> torch.Tensor:
    """Return the new value of `weight`, outside the memory `own` and with strides that pieces can read."""
    value: torch.Tensor = weight.places[0].found.detach()
    if value.untyped_storage().data_ptr() in own:
        value = value.clone()
    if weight.can_read_in_place(value):
        return value
    made = torch.empty_strided(value.shape, weight.memory.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value)


def _rebind(weight: _Weight, value: torch.Tensor) -> None:
    """Make pieces read `value`, and the module's tensors views of it."""
    assert weight.read is not None, "pieces read the merged tensor"
    weight.read.data = value
    weight.memory = _alias(value)
    _move(weight, value)


def _move(weight: _Weight, value: torch.Tensor) -> None:
    """Make the module's tensors of `weight` views of `value`."""
    for place in weight.places:
        place.held = place.found
        if not _is_same_memory(place.held, value):
            place.held.data = value


def _and(text: str) -> str:
    return f" ({text})" if text else ""


def _listed(problems: list[str]) -> str:
    more = len(problems) - MOST_NAMED
    return "; ".join(problems[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
