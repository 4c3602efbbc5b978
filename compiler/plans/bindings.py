"""The tensors of a module that a plan reads, by name, and the same tensors of another, equal module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecegraph.compiler.building.build import BuildResult
from piecegraph.compiler.common.call_targets import NotStorable
from piecegraph.compiler.plans.plan_format import Binding, StoredPlan
from piecegraph.compiler.rewriting.pass_contexts import store_together
from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor
from piecegraph.compiler.tracing.signature import BoundInput
from piecegraph.compiler.tracing.trace import Traced

_ROLE = "constant/"


@dataclass(slots=True)
class Bindings:
    """The bindings of a model while they are made, and the bytes of tensors without a name in the module."""

    known: Mapping[int, BoundInput]  # by id of the tensor
    places: Mapping[str, int]  # indices of places outside the module that the trace read, by source
    blobs: dict[str, bytes] = field(default_factory=dict)  # by role
    _bindings: dict[int, Binding] = field(default_factory=dict)

    def binding(self, value: Any) -> Binding:
        """Return the binding of a bound value. Raises `NotStorable` if it is not a tensor, or has no bytes to store."""
        if not isinstance(value, torch.Tensor):
            raise NotStorable(f"a split op takes a {type(value).__name__} that is not a tensor")
        if id(value) not in self._bindings:
            bound = self.known.get(id(value))
            if bound is not None and bound.kind != "constant":
                names = bound.members if bound.kind == "merged" else (bound.name,)
                self._bindings[id(value)] = Binding.of(bound.kind, names, value)
            elif bound is not None and bound.source in self.places:
                self._bindings[id(value)] = Binding.of("read", (str(self.places[bound.source]),), value)
            else:
                role = f"{_ROLE}{len(self.blobs)}"
                self.blobs[role] = _bytes_of(value)
                self._bindings[id(value)] = Binding.of("constant", (role,), value)
        return self._bindings[id(value)]

    def results(self, traced: Traced) -> tuple[tuple[str, Any], ...]:
        """Return the sources of the model's result, with bound tensors as bindings."""
        return tuple(
            (kind, self.binding(what) if kind == "bound" else what) for kind, what in traced.result_spec.sources
        )


def bindings_of(built: BuildResult, traced: Traced) -> tuple[dict[str, Binding], Bindings]:
    """Return the binding of each bound value by slot, and the object that made them. Raises `NotStorable`."""
    made = Bindings(
        {id(each.tensor): each for each in traced.inputs if isinstance(each, BoundInput)}, traced.reads.tensors
    )
    found = {slot.name: made.binding(built.namespace[slot.name]) for slot in built.plan.bound}
    return found, made


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        raise NotStorable("a constant has no values: it is computed from weights, which were not loaded")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise NotStorable(f"a constant is a {type(tensor).__name__}")
    flat = tensor.detach().cpu().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy())


@dataclass(frozen=True, slots=True)
class BoundTensors:
    """The tensors of a plan."""

    tensors: Mapping[str, torch.Tensor]  # by slot
    by_names: Mapping[tuple[str, ...], torch.Tensor]  # by the names of the binding
    watched: tuple[BoundInput, ...]  # parameters and buffers; merged ones one by one


Members = Mapping[tuple[str, ...], tuple[BoundInput, ...]]
"""The parameters or the buffer that a module has under the names of a binding; none for a constant."""

Constants = Mapping[tuple[str, ...], torch.Tensor]
"""Tensors by the names of a binding."""


def members_of(stored: StoredPlan, module: torch.nn.Module) -> Members:
    """Return what `stored` binds of `module`. Raises `NotStorable` for a tensor unlike the compiled one."""
    return {binding.names: _members(binding, module) for binding in _bindings(stored)}


def constants_of(stored: StoredPlan, blobs: Mapping[str, bytes], read: Sequence[Any]) -> Constants:
    """Return the tensors of `stored` that are not parameters or buffers.

    `read` holds the values at the places that the trace read. Raises `NotStorable` for bytes that do not fit their
    tensor, and for a place without such a tensor.
    """
    found = {}
    for binding in _bindings(stored):
        if binding.kind == "constant":
            found[binding.names] = _constant(binding, blobs)
        elif binding.kind == "read":
            tensor = read[int(binding.names[0])]
            if not isinstance(tensor, torch.Tensor) or not binding.fits(tensor):
                raise NotStorable(f"what was a tensor of {binding.dtype} {binding.shape} is a {type(tensor).__name__}")
            found[binding.names] = tensor
    return found


def bind(stored: StoredPlan, members: Members, constants: Constants) -> BoundTensors:
    """Return the tensors that `stored` reads. Merged parameters become views of one tensor, as in the compile."""
    tensors = dict(constants)
    for binding in _bindings(stored):
        if binding.kind == "merged":
            tensors[binding.names] = store_together(members[binding.names]).tensor
        elif binding.kind not in ("constant", "read"):
            tensors[binding.names] = members[binding.names][0].tensor
    return BoundTensors(
        tensors={slot: tensors[binding.names] for slot, binding in stored.bindings.items()},
        by_names=tensors,
        watched=tuple({each.name: each for found in members.values() for each in found}.values()),
    )


def _bindings(stored: StoredPlan) -> list[Binding]:
    """Return each distinct binding once."""
    every = [*stored.bindings.values(), *(what for kind, what in stored.results if kind == "bound")]
    return list({binding.names: binding for binding in every}.values())


def _members(binding: Binding, module: torch.nn.Module) -> tuple[BoundInput, ...]:
    """Return the parameters or the buffer that a binding names; none for a constant."""
    if binding.kind in ("constant", "read"):
        return ()
    kind = "buffer" if binding.kind == "buffer" else "parameter"
    found = [BoundInput.of(module, kind, name) for name in binding.names]
    if binding.kind == "merged":
        rows = sum(each.tensor.shape[0] for each in found)
        same = {(each.tensor.dtype, each.tensor.device, each.tensor.shape[1:]) for each in found}
        if same != {(binding.dtype, binding.device, torch.Size(binding.shape[1:]))} or rows != binding.shape[0]:
            raise NotStorable(f"{', '.join(binding.names)} do not make a tensor of {binding.shape}")
    elif not binding.fits(found[0].tensor):
        raise NotStorable(f"{binding.names[0]} does not match the compiled tensor: {binding.dtype} {binding.shape}")
    return tuple(found)


def _constant(binding: Binding, blobs: Mapping[str, bytes]) -> torch.Tensor:
    data = bytearray(blobs.get(binding.names[0], b""))
    made = torch.empty_strided(binding.shape, binding.stride, dtype=binding.dtype, device=binding.device)
    if len(data) != made.numel() * made.element_size():
        raise NotStorable(f"{binding.names[0]} has {len(data)} bytes, which make no tensor of {binding.shape}")
    if data:
        made.copy_(torch.frombuffer(data, dtype=torch.uint8).view(binding.dtype).reshape(binding.shape))
    return made
