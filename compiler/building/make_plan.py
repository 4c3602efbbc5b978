"""The plan of a graph that was split: its steps, and the values that the steps' source reads by name."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.call_targets import MethodCall
from piecegraph.compiler.common.split_ops import op_name
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.plan import CallStep, PieceStep, Plan, Slot, SplitCall, Step, TensorSpec
from piecegraph.compiler.splitting.split import Call, Piece, attribute_of
from piecegraph.passes.matching.torch_ir import value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInputs:
    """A graph's placeholders by the names that the stitched module uses, in order."""

    names: tuple[str, ...]
    bound: frozenset[str]  # names of fixed tensors; all other names are arguments
    size_symbols: Mapping[str, str]  # symbol -> size name, of the sizes that the caller declared
    call_sizes: Mapping[str, str]  # symbol -> name, of every size that is known when the module is called


def describe_split_calls(parts: Sequence[Piece | Call]) -> tuple[SplitCall, ...]:
    """Return a description of every call of a split op, in order, without tensors or nodes."""
    nodes = [part.node for part in parts if isinstance(part, Call) and part.is_split_op]
    return tuple(
        SplitCall(
            index=index,
            op=op_name(node.target),
            args=tuple(_describe(argument) for argument in node.args),
            kwargs=tuple((name, _describe(argument)) for name, argument in node.kwargs.items()),
        )
        for index, node in enumerate(nodes)
    )


def _describe(argument: Any) -> Any:
    """Return an argument of a split op with tensors as `TensorSpec` and symbolic sizes as text."""
    value = value_of(argument) if isinstance(argument, fx.Node) else argument
    if isinstance(value, torch.Tensor):
        shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        return TensorSpec(shape, value.dtype, value.device)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value)
    if isinstance(value, tuple | list):
        return type(value)(_describe(item) for item in value)
    return value


def make_plan(
    graph_module: fx.GraphModule,
    inputs: NamedInputs,
    constants: Mapping[str, torch.Tensor],
    bound_tensors: Mapping[str, torch.Tensor],
    parts: Sequence[Piece | Call],
    unique: Sequence[UniquePiece],
    written: Sequence[fx.Node],
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of `parts`, and the namespace that its source needs besides the pieces.

    `constants` holds tensors by placeholder, `bound_tensors` tensors by the names of `inputs`; `written` are the
    placeholders that the graph writes in place.
    """
    plan = _PlanInProgress(graph_module)
    given = iter(inputs.names)
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if node.name in constants:
            plan.bind(node, node.name, constants[node.name])
            continue
        name = next(given)
        if name in inputs.bound:
            plan.bind(node, name, bound_tensors[name])
        else:
            plan.arguments.append(plan.names.of(node, name))
    unique_of = {index: piece.index for piece in unique for index in piece.pieces}
    steps = [
        _piece_step(part, unique_of[part.index], plan) if isinstance(part, Piece) else _call_step(part, plan)
        for part in parts
    ]
    output = next(iter(reversed(graph_module.graph.nodes)))
    results = tuple(plan.slot_of(result) if isinstance(result, fx.Node) else result for result in output.args[0])
    written_slots = tuple(map(plan.slot_of, written))
    made = Plan(
        arguments=tuple(plan.arguments),
        bound=tuple(plan.bound),
        steps=tuple(steps),
        results=results,
        written=written_slots,
    )
    return made, plan.namespace


class _PlanInProgress:
    """The slots, bound values and namespace of a plan while its steps are made."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._graph_module = graph_module
        self.names = _Names()
        self.namespace: dict[str, Any] = {"torch": torch, "device": torch.device}
        self.arguments: list[Slot] = []
        self.bound: list[Slot] = []

    def bind(self, node: fx.Node, name: str, value: Any) -> Slot:
        """Make `value` the fixed value of `node`, under a slot name like `name`."""
        slot = self.names.of(node, name)
        self.bound.append(slot)
        self.namespace[slot.name] = value
        return slot

    def slot_of(self, node: fx.Node) -> Slot:
        """Return the slot of a node. A subgraph that a split op takes as an argument is bound on first use."""
        if node.op != "get_attr":
            return self.names.of(node, node.name)
        slot = self.names.of(node, f"graph_{node.target}")
        if slot.name not in self.namespace:
            self.bind(node, slot.name, attribute_of(self._graph_module, str(node.target)))
        return slot


def _piece_step(piece: Piece, unique: int, plan: _PlanInProgress) -> Step:
    return PieceStep(
        index=piece.index,
        unique=unique,
        inputs=tuple(map(plan.slot_of, piece.inputs)),
        outputs=tuple(map(plan.slot_of, piece.outputs)),
    )


def _call_step(call: Call, plan: _PlanInProgress) -> Step:
    node = call.node
    op = op_name(node.target) if node.op == "call_function" else str(node.target)
    function = "op_" + re.sub(r"\W+", "_", f"method_{op}" if node.op == "call_method" else op)
    plan.namespace[function] = _function(node)
    return CallStep(
        function=function,
        op=op,
        args=tuple(_with_slots(list(node.args), plan.slot_of)),
        kwargs=tuple(_with_slots(dict(node.kwargs), plan.slot_of).items()),
        output=plan.slot_of(node) if node.users else None,
        is_split_op=call.is_split_op,
    )


def _with_slots(arguments: Any, slot_of: Callable[[fx.Node], Slot]) -> Any:
    """Return the arguments of a call with each node replaced by its slot."""
    return fx.map_arg(arguments, slot_of)  # type: ignore[arg-type]  # typed for nodes, works for any value


def _function(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return MethodCall(str(node.target))
    function: Callable[..., Any] = node.target  # type: ignore[assignment]  # call_function: a callable
    return function


class _Names:
    """A distinct Python identifier for each node, derived from a wanted name."""

    def __init__(self) -> None:
        self._slots: dict[fx.Node, Slot] = {}
        self._taken = {"torch", "device", "float", "slice", "forward"}

    def of(self, node: fx.Node, wanted: str) -> Slot:
        if node not in self._slots:
            name = re.sub(r"\W+", "_", wanted).strip("_") or "value"
            if name[0].isdigit() or keyword.iskeyword(name) or re.match(r"(piece|op)_", name):
                name = f"v_{name}"
            unique, number = name, 1
            while unique in self._taken:
                number += 1
                unique = f"{name}__{number}"
            self._taken.add(unique)
            self._slots[node] = Slot(unique)
        return self._slots[node]
