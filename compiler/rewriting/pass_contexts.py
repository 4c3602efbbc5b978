"""The contexts that passes get with a graph (`PassContext`): for a traced graph, and for one with fixed inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import fx

from piecegraph.compiler.splitting.normalize import IsSplitOp
from piecegraph.compiler.tracing.signature import BoundInput, GraphInput
from piecegraph.passes.matching.graph_pass import PassContext
from piecegraph.passes.matching.torch_ir import value_of


class GraphContext(PassContext, Protocol):
    """A context with the questions that the compiler asks after a pass."""

    def may_erase(self, name: str) -> bool:
        """Return whether a pass may erase the placeholder of that name."""

    def was_added(self, name: str) -> bool:
        """Return whether the placeholder of that name was added for a pass."""


class TracedContext:
    """The context of a traced graph whose placeholders are `inputs`. Only `bound_inputs` changes tensors."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[GraphInput], is_split_op: IsSplitOp) -> None:
        self._graph = graph
        self.is_split_op = is_split_op
        self._inputs: dict[str, GraphInput] = {
            node.name: bound for node, bound in zip(self._placeholders(), inputs, strict=True)
        }
        self._members: dict[str, tuple[str, ...]] = {}  # of placeholders that take the place of several

    def is_weight(self, node: fx.Node) -> bool:
        bound = self._inputs.get(node.name) if node.op == "placeholder" else None
        return isinstance(bound, BoundInput) and bound.kind == "parameter" and owns_its_storage(bound.tensor)

    def concatenated(self, weights: Sequence[fx.Node]) -> fx.Node:
        if len(weights) < 2 or len(set(weights)) < len(weights) or not all(map(self.is_weight, weights)):
            raise ValueError(f"only different weights can be concatenated, not {list(weights)}")
        taken = {name for node in self._placeholders() for name in self._members.get(node.name, ())}
        if not taken.isdisjoint(weight.name for weight in weights):
            raise ValueError(f"one of {list(weights)} is part of another tensor already")
        parts = [value_of(weight) for weight in weights]
        if len({(part.dtype, part.device, part.shape[1:]) for part in parts}) > 1:
            raise ValueError(f"{list(weights)} differ in dtype, device or a size other than the first")
        with self._graph.inserting_before(weights[0]):
            whole = self._graph.placeholder("merged_" + weights[0].name)
        whole.meta["example_value"] = parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
        self._members[whole.name] = tuple(weight.name for weight in weights)
        return whole

    def may_erase(self, name: str) -> bool:
        return name in self._members or isinstance(self._inputs[name], BoundInput)

    def was_added(self, name: str) -> bool:
        return name in self._members

    def bound_inputs(self) -> tuple[GraphInput, ...]:
        """Return the input of each placeholder of the graph as it is now.

        Concatenates tensors where a pass asked for it, so that the module's parameters become views.
        """
        return tuple(
            self._inputs[node.name]
            if node.name in self._inputs
            else _store_together(self._members[node.name], self._inputs)
            for node in self._placeholders()
        )

    def _placeholders(self) -> list[fx.Node]:
        return list(self._graph.find_nodes(op="placeholder"))


class FixedInputs:
    """The context of a graph whose inputs, weights too, are the caller's: a graph of `torch.compile`, or a piece."""

    def __init__(self, is_split_op: IsSplitOp = lambda node: False) -> None:
        self.is_split_op = is_split_op

    def is_weight(self, node: fx.Node) -> bool:
        return False

    def concatenated(self, weights: Sequence[fx.Node]) -> fx.Node:
        raise ValueError(f"no input of this graph is a weight, so {list(weights)} cannot be concatenated")

    def may_erase(self, name: str) -> bool:
        return False

    def was_added(self, name: str) -> bool:
        return False


def _store_together(names: Sequence[str], inputs: Mapping[str, GraphInput]) -> BoundInput:
    bound = [member for member in map(inputs.__getitem__, names) if isinstance(member, BoundInput)]
    assert len(bound) == len(names), names
    return store_together(bound)


def store_together(bound: Sequence[BoundInput]) -> BoundInput:
    """Concatenate tensors along the first dim and return the whole; each member becomes a view of its part."""
    together = torch.cat([member.tensor.detach() for member in bound])
    start = 0
    for member in bound:
        end = start + member.tensor.shape[0]
        member.tensor.data = together[start:end]
        start = end
    members = tuple(member.name for member in bound)
    return BoundInput(name="+".join(members), kind="merged", tensor=together, members=members)


def owns_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its storage alone, so that it may be moved without affecting others."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
