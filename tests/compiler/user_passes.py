"""Passes as a caller would write them, right and wrong; importable, so that compile processes make them again."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult, Place


def _relus(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=torch.relu))


@dataclass(frozen=True)
class ReluToClamp(GraphPass):
    """relu becomes clamp: the same values. `at_most` sites; the others are misses."""

    name: ClassVar[str] = "relu-to-clamp"
    at_most: int = 100

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        relus = _relus(graph)
        for relu in relus[: self.at_most]:
            with graph.inserting_before(relu):
                clamp = graph.call_function(torch.clamp_min, (relu.args[0], 0))
            relu.replace_all_uses_with(clamp)
            graph.erase_node(relu)
        misses = tuple(Miss(relu.name, f"only {self.at_most} may match") for relu in relus[self.at_most :])
        return PassResult(matches=min(len(relus), self.at_most), misses=misses)


@dataclass(frozen=True)
class ReluToClampInPieces(ReluToClamp):
    name: ClassVar[str] = "relu-to-clamp-in-pieces"
    place: ClassVar[Place] = Place.PIECE


@dataclass(frozen=True)
class ReluToPython(GraphPass):
    """relu becomes a function of torch that is written in Python, which Inductor compiles and torch does not save."""

    name: ClassVar[str] = "relu-to-python"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        relus = _relus(graph)
        for relu in relus:
            relu.target = torch._refs.nn.functional.relu
        return PassResult(matches=len(relus))


@dataclass(frozen=True)
class ReluToClampInInductor(GraphPass):
    """The same on ATen. `says`: what it claims to have matched, if that is to be wrong."""

    name: ClassVar[str] = "relu-to-clamp-in-inductor"
    place: ClassVar[Place] = Place.POST_GRAD
    bound: float = 0.0
    says: int | None = None
    data: Any = None

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        relus = list(graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default))
        for relu in relus:
            with graph.inserting_before(relu):
                clamp = graph.call_function(torch.ops.aten.clamp_min.default, (relu.args[0], self.bound))
            relu.replace_all_uses_with(clamp)
            graph.erase_node(relu)
        return PassResult(matches=len(relus) if self.says is None else self.says)


@dataclass(frozen=True)
class Breaks(GraphPass):
    """Does what a pass must not do, in one way of several."""

    name: ClassVar[str] = "breaks"
    how: str = "raises"

    def apply(self, graph: fx.Graph, context: PassContext) -> Any:
        relu = _relus(graph)[0]
        output = next(iter(reversed(graph.nodes)))
        results: Any = output.args[0]
        x: Any = relu.args[0]
        match self.how:
            case "raises":
                graph.erase_node(output)
                relu.replace_all_uses_with(x)
                raise KeyError("no such thing")
            case "lint":
                with graph.inserting_before(x):
                    relu.args = (graph.call_function(torch.neg, (relu,)),)
            case "computes nothing":
                relu.args = (relu.args[0], "a")
                relu.meta.pop("example_value")
            case "one output more":
                output.args = ((*results, relu),)
            case "dtype":
                with graph.inserting_before(output):
                    output.args = ((graph.call_method("to", (results[0], torch.float64)),),)
            case "shape":
                with graph.inserting_before(output):
                    output.args = ((graph.call_method("flatten", (results[0],)),),)
            case "no result":
                return None
            case "silent change":
                relu.target = torch.abs
                return PassResult()
            case "no change":
                return PassResult(matches=2)
            case "negative":
                return PassResult(matches=-1)
            case "bool":
                return PassResult(matches=True)
            case "miss":
                return PassResult(misses=("relu",))  # type: ignore[arg-type]
            case "loses a split op" | "adds a split op":
                split_op = next(node for node in graph.nodes if context.is_split_op(node))
                if self.how.startswith("adds"):
                    split_op.append(graph.node_copy(split_op))
                else:
                    graph.erase_node(split_op)
            case "erases an input":
                values = {node: node.meta["example_value"] for node in graph.find_nodes(op="placeholder")}
                kept, erased, *_ = [node for node, value in values.items() if isinstance(value, torch.Tensor)]
                erased.replace_all_uses_with(kept)
                graph.erase_node(erased)
            case "adds an input":
                with graph.inserting_before(next(iter(graph.nodes))):
                    graph.placeholder("mine").meta["example_value"] = relu.meta["example_value"]
            case "concatenates anything":
                context.concatenated([relu, relu])
            case "erases what is read":
                graph.erase_node(relu)
        return PassResult(matches=1)


@dataclass(frozen=True)
class BreaksInPieces(Breaks):
    """In those that have a relu."""

    name: ClassVar[str] = "breaks-in-pieces"
    place: ClassVar[Place] = Place.PIECE

    def apply(self, graph: fx.Graph, context: PassContext) -> Any:
        return super().apply(graph, context) if _relus(graph) else PassResult()


@dataclass(frozen=True)
class SwapsSplitOps(GraphPass):
    """A call of `pgtoy::triple` becomes one of `pgtoy::pair`, and an item of it."""

    name: ClassVar[str] = "swaps-split-ops"
    replaces_split_ops: ClassVar[bool] = True

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        found = [node for node in graph.nodes if node.target is torch.ops.pgtoy.triple.default]
        for node in found:
            with graph.inserting_before(node):
                pair = graph.call_function(torch.ops.pgtoy.pair.default, node.args)
                item = graph.call_function(operator.getitem, (pair, 1))
            node.replace_all_uses_with(item)
            graph.erase_node(node)
        return PassResult(matches=len(found))


@dataclass(frozen=True)
class SwapsSilently(SwapsSplitOps):
    name: ClassVar[str] = "swaps-silently"
    replaces_split_ops: ClassVar[bool] = False
