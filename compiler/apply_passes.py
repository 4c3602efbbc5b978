"""Run passes over the traced graph, and bind the tensors that come of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from piecegraph.compiler import torch_compat
from piecegraph.compiler.report import PassRow
from piecegraph.compiler.split_ops import split_op_matcher
from piecegraph.compiler.trace import BoundInput, GraphInput, Traced
from piecegraph.config import CompileConfig
from piecegraph.passes.graph_pass import GraphPass, Place
from piecegraph.passes.torch_ir import value_of


def apply_passes(
    traced: Traced, passes: Sequence[GraphPass], config: CompileConfig
) -> tuple[Traced, tuple[PassRow, ...]]:
    """`traced` with those of `passes` applied that work on it, its graph rewritten in place, and a row for each.

    Mutates the module: weights that were concatenated become views of the whole, so memory does not
    grow and `state_dict` is what it was.
    """
    graph = traced.graph_module.graph
    context = TracedContext(graph, traced.inputs, config.split_ops)
    rows = []
    for each in passes:
        if each.place is not Place.TRACED:
            continue
        start = time.perf_counter()
        before = len(graph.nodes)
        result = each.apply(graph, context)
        if result.matches:
            torch_compat.refresh_examples(graph, [node for node in graph.nodes if "example_value" not in node.meta])
            graph.lint()
        rows.append(
            PassRow(
                name=each.name,
                matches=result.matches,
                misses=result.misses,
                nodes_removed=before - len(graph.nodes),
                seconds=time.perf_counter() - start,
            )
        )
    traced.graph_module.recompile()
    return replace(traced, inputs=context.bound_inputs()), tuple(rows)


class TracedContext:
    """What passes may ask of a traced graph (`PassContext`). Tensors are touched by `bound_inputs` only."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[GraphInput], split_ops: Sequence[str]) -> None:
        self._graph = graph
        self.is_split_op = split_op_matcher(graph, split_ops)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._inputs: dict[str, GraphInput] = {
            node.name: bound for node, bound in zip(placeholders, inputs, strict=True)
        }
        self._members: dict[str, tuple[str, ...]] = {}  # of placeholders that take the place of several

    def is_weight(self, node: fx.Node) -> bool:
        bound = self._inputs.get(node.name) if node.op == "placeholder" else None
        return isinstance(bound, BoundInput) and bound.kind == "parameter" and _is_alone(bound.tensor)

    def concatenated(self, weights: Sequence[fx.Node]) -> fx.Node:
        assert len(weights) > 1 and all(map(self.is_weight, weights)), weights
        with self._graph.inserting_before(weights[0]):
            whole = self._graph.placeholder("merged_" + weights[0].name)
        parts = [value_of(weight) for weight in weights]
        whole.meta["example_value"] = parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
        self._members[whole.name] = tuple(weight.name for weight in weights)
        return whole

    def bound_inputs(self) -> tuple[GraphInput, ...]:
        """What each placeholder of the graph is now. Stores tensors together that were concatenated."""
        return tuple(
            self._inputs[node.name]
            if node.name in self._inputs
            else _store_together(self._members[node.name], self._inputs)
            for node in self._graph.nodes
            if node.op == "placeholder"
        )


def _store_together(names: Sequence[str], inputs: Mapping[str, GraphInput]) -> BoundInput:
    """One tensor that holds all members; each member becomes a view of its part."""
    bound = [member for member in map(inputs.__getitem__, names) if isinstance(member, BoundInput)]
    assert len(bound) == len(names), names
    together = torch.cat([member.tensor.detach() for member in bound])
    start = 0
    for member in bound:
        end = start + member.tensor.shape[0]
        member.tensor.data = together[start:end]
        start = end
    return BoundInput(name="+".join(member.name for member in bound), kind="merged", tensor=together)


def _is_alone(tensor: torch.Tensor) -> bool:
    """It has its memory to itself, so giving it other memory takes nothing from anybody."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
