"""A compiled model as JSON, tensors and code left out, and back (docs/cache.md says which field is what).

Nothing here is evaluated: the stitched source is generated anew from the steps, conditions on sizes are read by a
parser of arithmetic, and a function is one of torch's or an op that this process has registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.call_spec import ResultSpec
from piecegraph.compiler.call_targets import NotStorable, schema_of, target_as_data, target_of
from piecegraph.compiler.plan import CallStep, PieceStep, Plan, Slot, SplitCall, Step
from piecegraph.compiler.report import CompileReport
from piecegraph.compiler.size_conditions import NotACondition, SizeCondition
from piecegraph.compiler.stored.values import as_data, from_data
from piecegraph.compiler.trace import ArgumentInput, SizeInput
from piecegraph.compiler.traced_globals import GlobalFact

PLAN_FORMAT = 1
"""Of a plan's blobs; part of every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What a bound value of a plan is, as a module that is like the traced one has it."""

    kind: str  # "parameter", "buffer", "merged" or "constant"
    names: tuple[str, ...]  # paths of the parameters or the buffer; of a constant, the role of its blob
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, kind: str, names: Sequence[str], tensor: torch.Tensor) -> Binding:
        return cls(
            kind=kind,
            names=tuple(names),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            device=tensor.device,
        )

    def fits(self, tensor: torch.Tensor) -> bool:
        """`tensor` can be bound in place of the one that was."""
        return (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device) == (
            self.dtype,
            self.shape,
            self.stride,
            self.device,
        )

    """A part of the model's result that is a bound tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """All of a compiled model but tensors and pieces."""

    plan: Plan
    targets: Mapping[str, Any]  # what the steps call, by name in the stitched module
    bindings: Mapping[str, Binding]  # by slot
    arguments: tuple[SizeInput | ArgumentInput, ...]
    size_symbols: Mapping[str, str]
    results: tuple[tuple[str, Any], ...]  # as `ResultSpec.sources`, a bound one being a `Binding`
    tree: pytree.TreeSpec
    conditions: tuple[SizeCondition, ...]
    symbols: tuple[frozenset[str], ...]  # by unique index
    pieces: tuple[str, ...]  # keys, by unique index
    static: Mapping[tuple[int, int], str]  # keys, by unique index and size
    split_calls: tuple[SplitCall, ...]
    sources: Mapping[str, str]  # module -> sha256
    globals: tuple[GlobalFact, ...]
    report: CompileReport


def to_document(stored: StoredPlan) -> dict[str, Any]:
    """`stored` as JSON. Raises `NotStorable`, saying what is no data."""
    for condition in stored.conditions:
        try:
            SizeCondition.parse(condition.text)
        except NotACondition as error:
            raise NotStorable(f"it relies on {condition.text}, which cannot be written down: {error}") from None
    tree = pytree.treespec_dumps(stored.tree)
    return {
        "format": PLAN_FORMAT,
        "plan": {
            "arguments": [slot.name for slot in stored.plan.arguments],
            "bound": [slot.name for slot in stored.plan.bound],
            "steps": [_step(step, stored.targets) for step in stored.plan.steps],
            "results": as_data(list(stored.plan.results)),
        },
        "bindings": {name: _binding(binding) for name, binding in stored.bindings.items()},
        "inputs": [
            {"size": [each.name, each.leaf, each.dim]}
            if isinstance(each, SizeInput)
            else {"argument": [each.name, each.leaf]}
            for each in stored.arguments
        ],
        "size_symbols": dict(stored.size_symbols),
        "results": [
            [kind, _binding(what) if isinstance(what, Binding) else as_data(what)] for kind, what in stored.results
        ],
        "tree": tree,
        "assertions": [condition.text for condition in stored.conditions],
        "symbols": [sorted(symbols) for symbols in stored.symbols],
        "pieces": list(stored.pieces),
        "static": [{"unique": unique, "size": size, "key": key} for (unique, size), key in stored.static.items()],
        "split_calls": [
            {"index": call.index, "op": call.op, "args": as_data(call.args), "kwargs": as_data(dict(call.kwargs))}
            for call in stored.split_calls
        ],
        "schemas": {name: text for name, target in stored.targets.items() if (text := schema_of(target)) is not None},
        "sources": dict(stored.sources),
        "globals": [[each.module, each.path, each.fact] for each in stored.globals],
        "report": stored.report.as_dict(),
    }


def from_document(document: Any) -> StoredPlan:
    """What `to_document` wrote of. Raises `NotStorable` for what this process cannot do, and KeyError, TypeError or
    ValueError for a document that says something else."""
    if document["format"] != PLAN_FORMAT:
        raise NotStorable(f"its plan has format {document['format']}; this version reads {PLAN_FORMAT}")
    plan = document["plan"]
    targets: dict[str, Any] = {}
    steps = tuple(_step_of(step, targets) for step in plan["steps"])
    for name, text in document["schemas"].items():
        if schema_of(targets[name]) != text:
            raise NotStorable(f"op {name} is {schema_of(targets[name])} here; it was compiled with {text}")
    return StoredPlan(
        plan=Plan(
            arguments=tuple(map(Slot, plan["arguments"])),
            bound=tuple(map(Slot, plan["bound"])),
            steps=steps,
            results=tuple(from_data(plan["results"])),
        ),
        targets=targets,
        bindings={name: _binding_of(binding) for name, binding in document["bindings"].items()},
        arguments=tuple(
            SizeInput(*each["size"]) if "size" in each else ArgumentInput(*each["argument"])
            for each in document["inputs"]
        ),
        size_symbols=document["size_symbols"],
        results=tuple(
            (kind, _binding_of(what) if kind == "bound" else from_data(what)) for kind, what in document["results"]
        ),
        tree=pytree.treespec_loads(document["tree"]),
        conditions=tuple(map(SizeCondition.parse, document["assertions"])),
        symbols=tuple(map(frozenset, document["symbols"])),
        pieces=tuple(document["pieces"]),
        static={(each["unique"], each["size"]): each["key"] for each in document["static"]},
        split_calls=tuple(
            SplitCall(
                index=call["index"],
                op=call["op"],
                args=from_data(call["args"]),
                kwargs=tuple(from_data(call["kwargs"]).items()),
            )
            for call in document["split_calls"]
        ),
        sources=document["sources"],
        globals=tuple(GlobalFact(*each) for each in document["globals"]),
        report=CompileReport.from_dict(document["report"]),
    )


def result_spec(stored: StoredPlan, tensor_of: Mapping[tuple[str, ...], torch.Tensor]) -> ResultSpec:
    """How the model's result is built, over the bound tensors by the names of their bindings."""
    sources = [(kind, tensor_of[what.names] if isinstance(what, Binding) else what) for kind, what in stored.results]
    return ResultSpec(sources=tuple(sources), tree=stored.tree)


def _step(step: Step, targets: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(step, PieceStep):
        return {
            "piece": step.index,
            "unique": step.unique,
            "inputs": [slot.name for slot in step.inputs],
            "outputs": [slot.name for slot in step.outputs],
        }
    return {
        "call": target_as_data(targets[step.function]),
        "function": step.function,
        "op": step.op,
        "args": as_data(step.args),
        "kwargs": as_data(dict(step.kwargs)),
        "output": step.output.name if step.output is not None else None,
        "is_split_op": step.is_split_op,
    }


def _step_of(data: Mapping[str, Any], targets: dict[str, Any]) -> Step:
    if "piece" in data:
        return PieceStep(
            index=data["piece"],
            unique=data["unique"],
            inputs=tuple(map(Slot, data["inputs"])),
            outputs=tuple(map(Slot, data["outputs"])),
        )
    targets[data["function"]] = target_of(data["call"])
    return CallStep(
        function=data["function"],
        op=data["op"],
        args=from_data(data["args"]),
        kwargs=tuple(from_data(data["kwargs"]).items()),
        output=Slot(data["output"]) if data["output"] is not None else None,
        is_split_op=data["is_split_op"],
    )


def _binding(binding: Binding) -> dict[str, Any]:
    names: Any = list(binding.names) if binding.kind == "merged" else binding.names[0]
    return {
        binding.kind: names,
        "dtype": str(binding.dtype).removeprefix("torch."),
        "shape": list(binding.shape),
        "stride": list(binding.stride),
        "device": str(binding.device),
    }


def _binding_of(data: Mapping[str, Any]) -> Binding:
    kind = next(kind for kind in ("parameter", "buffer", "merged", "constant") if kind in data)
    return Binding(
        kind=kind,
        names=tuple(data[kind]) if kind == "merged" else (data[kind],),
        dtype=from_data({"torch": data["dtype"]}),
        shape=tuple(data["shape"]),
        stride=tuple(data["stride"]),
        device=torch.device(data["device"]),
    )
