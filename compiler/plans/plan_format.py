"""A compiled model as JSON without tensors and code, and back (docs/cache_format.md explains the fields).

Nothing is evaluated: the stitched source is generated again from the steps, conditions on sizes are read by a parser of
arithmetic, and a function is one of torch's or an op registered in this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.common.call_targets import NotStorable, schema_of, target_as_data, target_from_data
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.common.size_conditions import NotACondition, SizeCondition
from piecegraph.compiler.splitting.plan import CallStep, PieceStep, Plan, Slot, SplitCall, Step
from piecegraph.compiler.store.values import as_data, from_data
from piecegraph.compiler.tracing.signature import ArgumentInput, ResultSpec, SizeInput
from piecegraph.compiler.tracing.traced_reads import ReadFact, TracedReads

PLAN_FORMAT = 2
"""The version of the format of a plan's blobs; part of every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A bound value of a plan: the names and the layout that a module like the traced one must have."""

    kind: str  # "parameter", "buffer", "merged", "constant" or "read"
    names: tuple[str, ...]  # paths of parameters or of the buffer; "constant": role of the blob; "read": index of the
    # place
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, kind: str, names: Sequence[str], tensor: torch.Tensor) -> Binding:
        """Return the binding of `tensor`."""
        return cls(
            kind=kind,
            names=tuple(names),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            device=tensor.device,
        )

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` has the dtype, shape, strides and device of the compiled one."""
        return (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device) == (
            self.dtype,
            self.shape,
            self.stride,
            self.device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A compiled model without tensors and pieces."""

    plan: Plan
    targets: Mapping[str, Any]  # functions that the steps call, by name in the stitched module
    bindings: Mapping[str, Binding]  # by slot
    arguments: tuple[SizeInput | ArgumentInput, ...]
    size_symbols: Mapping[str, str]
    results: tuple[tuple[str, Any], ...]  # as `ResultSpec.sources`, bound tensors as `Binding`
    tree: pytree.TreeSpec
    conditions: tuple[SizeCondition, ...]
    symbols: tuple[frozenset[str], ...]  # by unique index
    pieces: tuple[str, ...]  # keys, by unique index
    static: Mapping[tuple[int, int], str]  # keys, by unique index and size
    split_calls: tuple[SplitCall, ...]
    sources: Mapping[str, str]  # module -> sha256
    reads: TracedReads
    report: CompileReport


def to_document(stored: StoredPlan) -> dict[str, Any]:
    """Return `stored` as JSON data. Raises `NotStorable`, naming the value that is not data."""
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
            "written": [slot.name for slot in stored.plan.written],
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
        "reads": reads_as_data(stored.reads),
        "report": stored.report.as_dict(),
    }


def from_document(document: Any) -> StoredPlan:
    """Return the plan that `to_document` wrote.

    Raises `NotStorable` for a plan that this process cannot run, and KeyError, TypeError or ValueError for a document
    of another form.
    """
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
            written=tuple(map(Slot, plan["written"])),
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
        reads=reads_of_data(document["reads"]),
        report=CompileReport.from_dict(document["report"]),
    )


def result_spec(stored: StoredPlan, tensor_of: Mapping[tuple[str, ...], torch.Tensor]) -> ResultSpec:
    """Return how the model's result is built, from bound tensors by the names of their bindings."""
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
    targets[data["function"]] = target_from_data(data["call"])
    return CallStep(
        function=data["function"],
        op=data["op"],
        args=from_data(data["args"]),
        kwargs=tuple(from_data(data["kwargs"]).items()),
        output=Slot(data["output"]) if data["output"] is not None else None,
        is_split_op=data["is_split_op"],
    )


def reads_as_data(reads: TracedReads) -> dict[str, Any]:
    """Return the reads of a trace as JSON data. Raises `NotStorable`."""
    return {
        "places": [[parent, kind, as_data(argument)] for parent, (kind, argument) in reads.places],
        "facts": [[each.place, each.kind, as_data(each.detail), each.text] for each in reads.facts],
        "identities": [list(each) for each in reads.identities],
    }


def reads_of_data(data: Mapping[str, Any]) -> TracedReads:
    """Return the reads that `reads_as_data` wrote, without tensors."""
    return TracedReads(
        places=tuple((parent, (kind, from_data(argument))) for parent, kind, argument in data["places"]),
        facts=tuple(ReadFact(place, kind, from_data(detail), text) for place, kind, detail, text in data["facts"]),
        identities=tuple((place, number) for place, number in data["identities"]),
        tensors={},
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
    kind = next(kind for kind in ("parameter", "buffer", "merged", "constant", "read") if kind in data)
    return Binding(
        kind=kind,
        names=tuple(data[kind]) if kind == "merged" else (data[kind],),
        dtype=from_data({"torch": data["dtype"]}),
        shape=tuple(data["shape"]),
        stride=tuple(data["stride"]),
        device=torch.device(data["device"]),
    )
