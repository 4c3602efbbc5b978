"""Which tensors of a module a plan reads, by name; and the same tensors of another module that is like it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from piecegraph.compiler.build import Built
from piecegraph.compiler.call_targets import NotStorable
from piecegraph.compiler.pass_contexts import stored_together
from piecegraph.compiler.stored.plan_format import Binding, StoredPlan
from piecegraph.compiler.trace import BoundInput, Traced

_ROLE = "constant/"


@dataclass(slots=True)
class Bindings:
    """Bindings of one model as they are made, and the bytes of tensors that have no name in the module."""

    known: Mapping[int, BoundInput]  # by id of the tensor
    blobs: dict[str, bytes] = field(default_factory=dict)  # by role
    _bindings: dict[int, Binding] = field(default_factory=dict)

    def binding(self, value: Any) -> Binding:
        """Of a bound value. Raises `NotStorable` for one that is no tensor, or one no bytes can be had of."""
        if not isinstance(value, torch.Tensor):
            raise NotStorable(f"a split op takes a {type(value).__name__} that is no tensor")
        if id(value) not in self._bindings:
            bound = self.known.get(id(value))
            if bound is not None and bound.kind != "constant":
                names = bound.members if bound.kind == "merged" else (bound.name,)
                self._bindings[id(value)] = Binding.of(bound.kind, names, value)
            else:
                role = f"{_ROLE}{len(self.blobs)}"
                self.blobs[role] = _bytes_of(value)
                self._bindings[id(value)] = Binding.of("constant", (role,), value)
        return self._bindings[id(value)]

    def results(self, traced: Traced) -> tuple[tuple[str, Any], ...]:
        """What the model's result is made of, bound tensors as bindings."""
        return tuple(
            (kind, self.binding(what) if kind == "bound" else what) for kind, what in traced.result_spec.sources
        )


def bindings_of(built: Built, traced: Traced) -> tuple[dict[str, Binding], Bindings]:
    """By slot, what each bound value of a model is. Raises `NotStorable`."""
    made = Bindings({id(each.tensor): each for each in traced.inputs if isinstance(each, BoundInput)})
    found = {slot.name: made.binding(built.namespace[slot.name]) for slot in built.plan.bound}
    return found, made


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        raise NotStorable("a constant has no values: it stands for one that comes of weights, which were not read")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise NotStorable(f"a constant is a {type(tensor).__name__}")
    flat = tensor.detach().cpu().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy())


@dataclass(frozen=True, slots=True)
class Bound:
    """The tensors of a plan."""

    tensors: Mapping[str, torch.Tensor]  # by slot
    by_names: Mapping[tuple[str, ...], torch.Tensor]  # by the names of a binding
    watched: tuple[BoundInput, ...]  # parameters and buffers, those that were merged one by one


Members = Mapping[tuple[str, ...], tuple[BoundInput, ...]]
"""By the names of a binding, the parameters or the buffer that a module has under them; none for a constant."""

Constants = Mapping[tuple[str, ...], torch.Tensor]
"""By the names of a binding."""


def members_of(stored: StoredPlan, module: torch.nn.Module) -> Members:
    """What `stored` binds of `module`. Raises `NotStorable` if one is not what it was."""
    return {binding.names: _members(binding, module) for binding in _bindings(stored)}


def constants_of(stored: StoredPlan, blobs: Mapping[str, bytes]) -> Constants:
    """The tensors of `stored` that are not the module's. Raises `NotStorable` for bytes that make none."""
    return {binding.names: _constant(binding, blobs) for binding in _bindings(stored) if binding.kind == "constant"}


def bind(stored: StoredPlan, members: Members, constants: Constants) -> Bound:
    """The tensors that `stored` reads. Parameters that were merged become views of one tensor, as when it was
    compiled."""
    tensors = dict(constants)
    for binding in _bindings(stored):
        if binding.kind == "merged":
            tensors[binding.names] = stored_together(members[binding.names]).tensor
        elif binding.kind != "constant":
            tensors[binding.names] = members[binding.names][0].tensor
    return Bound(
        tensors={slot: tensors[binding.names] for slot, binding in stored.bindings.items()},
        by_names=tensors,
        watched=tuple({each.name: each for found in members.values() for each in found}.values()),
    )


def _bindings(stored: StoredPlan) -> list[Binding]:
    """Each once."""
    every = [*stored.bindings.values(), *(what for kind, what in stored.results if kind == "bound")]
    return list({binding.names: binding for binding in every}.values())


def _members(binding: Binding, module: torch.nn.Module) -> tuple[BoundInput, ...]:
    """The parameters or the buffer that a binding names; none for a constant."""
    if binding.kind == "constant":
        return ()
    kind = "buffer" if binding.kind == "buffer" else "parameter"
    found = [BoundInput.of(module, kind, name) for name in binding.names]
    if binding.kind == "merged":
        rows = sum(each.tensor.shape[0] for each in found)
        same = {(each.tensor.dtype, each.tensor.device, each.tensor.shape[1:]) for each in found}
        if same != {(binding.dtype, binding.device, torch.Size(binding.shape[1:]))} or rows != binding.shape[0]:
            raise NotStorable(f"{', '.join(binding.names)} do not make a tensor of {binding.shape}")
    elif not binding.fits(found[0].tensor):
        raise NotStorable(f"{binding.names[0]} is not the tensor it was: {binding.dtype} {binding.shape}")
    return tuple(found)


def _constant(binding: Binding, blobs: Mapping[str, bytes]) -> torch.Tensor:
    data = bytearray(blobs.get(binding.names[0], b""))
    made = torch.empty_strided(binding.shape, binding.stride, dtype=binding.dtype, device=binding.device)
    if len(data) != made.numel() * made.element_size():
        raise NotStorable(f"{binding.names[0]} has {len(data)} bytes, which make no tensor of {binding.shape}")
    if data:
        made.copy_(torch.frombuffer(data, dtype=torch.uint8).view(binding.dtype).reshape(binding.shape))
    return made
