"""Run one pass over one graph, check what it did, and undo it if that is wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.fake_values import computed_value, computing_on_fakes, is_same_layout
from piecegraph.compiler.common.source_line import source_line
from piecegraph.compiler.common.split_ops import op_name
from piecegraph.compiler.rewriting.graph_snapshot import GraphSnapshot
from piecegraph.compiler.rewriting.pass_contexts import GraphContext
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult

MADE_BY = "made_by"
"""The key in `node.meta` for the name of the pass that made a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutcome:
    """The outcome of a pass on a graph. With an `error` the pass was undone."""

    matches: int = 0
    misses: tuple[Miss, ...] = ()
    nodes_removed: int = 0
    seconds: float = 0.0
    error: str = ""
    cause: Exception | None = field(default=None, compare=False)
    before: GraphSnapshot | None = field(default=None, compare=False)  # where it matched


class _BrokenPromise(Exception):
    """An error for a pass that broke a promise of passes. The message says which."""


def run_pass(
    graph_pass: GraphPass,
    graph: fx.Graph,
    context: GraphContext,
    *,
    value_key: str = "example_value",
) -> PassOutcome:
    """Apply the pass to `graph` and return the outcome.

    A pass that fails raises nothing: the graph is restored, with new nodes of the old names. `value_key` is the key
    of a node's value in its `meta`.
    """
    start = time.perf_counter()
    before = GraphSnapshot(graph)
    promised = _Promises.of(graph, context, value_key)
    try:
        result = _checked(graph_pass, graph_pass.apply(graph, context))
        if result.matches == 0 and before.is_unchanged(graph):
            outcome = PassOutcome(misses=_located(result.misses, graph))
        else:
            _check_count(result, before, graph)
            _complete(graph, before, value_key)
            graph.lint()
            promised.check(graph, graph_pass)
            _tag(graph, before, graph_pass.name)
            outcome = PassOutcome(
                matches=result.matches,
                misses=_located(result.misses, graph),
                nodes_removed=len(before.nodes) - len(graph.nodes),
                before=before,
            )
    except Exception as error:
        if not before.is_unchanged(graph):
            before.restore(graph)
        text = str(error) if isinstance(error, _BrokenPromise) else f"{type(error).__name__}: {error}"
        outcome = PassOutcome(error=" ".join(text.split())[:600], cause=error)
    return replace(outcome, seconds=time.perf_counter() - start)


def _checked(graph_pass: GraphPass, result: Any) -> PassResult:
    if not isinstance(result, PassResult):
        raise _BrokenPromise(f"apply returned {result!r}; it must return a PassResult")
    if not isinstance(result.matches, int) or isinstance(result.matches, bool) or result.matches < 0:
        raise _BrokenPromise(f"it says that it matched {result.matches!r} times; that is a whole number, 0 or more")
    for miss in result.misses:
        if not isinstance(miss, Miss):
            raise _BrokenPromise(f"misses has {miss!r}; it must hold Miss(node, reason)")
    return result


def _check_count(result: PassResult, before: GraphSnapshot, graph: fx.Graph) -> None:
    if result.matches == 0:
        raise _BrokenPromise("it says that it matched nothing, but it changed the graph")
    if before.is_unchanged(graph):
        raise _BrokenPromise(f"it says that it matched {result.matches} times, but it changed nothing")


def _complete(graph: fx.Graph, before: GraphSnapshot, value_key: str) -> None:
    """Compute the values of new nodes, and of nodes whose inputs changed their layout."""
    rewired = before.rewired()
    changed: set[fx.Node] = set()

    def is_stale(node: fx.Node) -> bool:
        if value_key not in node.meta or (changed and not changed.isdisjoint(node.all_input_nodes)):
            return True
        if node not in rewired:
            return False
        now = _values((node.args, node.kwargs), value_key)
        return not is_same_layout(_values(rewired[node], value_key), now)

    with computing_on_fakes([node.meta.get(value_key) for node in graph.nodes]):
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method") or not is_stale(node):
                continue
            old, new = node.meta.get(value_key), computed_value(node, value_key)
            node.meta[value_key] = new
            if old is not None and not is_same_layout(old, new):
                changed.add(node)


def _values(arguments: Any, value_key: str) -> list[Any]:
    """Return the values of the nodes among some arguments, in order."""
    return [node.meta.get(value_key) for node in _nodes(arguments)]


def _nodes(arguments: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(arguments, nodes.append)
    return nodes


def _tag(graph: fx.Graph, before: GraphSnapshot, name: str) -> None:
    """Tag new nodes with the pass that made them, and with the model's line of what they replace.

    The line is that of the node that their reader read before, else of their reader.
    """
    for node, (args, kwargs) in before.rewired().items():
        for old, new in zip(_nodes((args, kwargs)), _nodes((node.args, node.kwargs)), strict=False):
            if new not in before and "stack_trace" in old.meta:
                new.meta.setdefault("stack_trace", old.meta["stack_trace"])
    for node in reversed(graph.nodes):
        if node in before or node.op == "placeholder":
            continue
        node.meta.setdefault(MADE_BY, name)
        traces = (user.meta["stack_trace"] for user in node.users if "stack_trace" in user.meta)
        if "stack_trace" not in node.meta and (trace := next(traces, None)) is not None:
            node.meta["stack_trace"] = trace


def _located(misses: tuple[Miss, ...], graph: fx.Graph) -> tuple[Miss, ...]:
    """Add the model's own lines to misses."""
    wanted = {miss.node for miss in misses if not miss.line}
    lines = {node.name: source_line(node) for node in graph.nodes if node.name in wanted} if wanted else {}
    return tuple(replace(miss, line=lines[miss.node]) if miss.node in lines else miss for miss in misses)


@dataclass(frozen=True, slots=True)
class _Promises:
    """The properties of a graph that a pass must preserve."""

    context: GraphContext
    value_key: str
    outputs: tuple[Any, ...]
    inputs: tuple[str, ...]
    split_ops: tuple[str, ...]

    @classmethod
    def of(cls, graph: fx.Graph, context: GraphContext, value_key: str) -> _Promises:
        inputs = tuple(node.name for node in graph.nodes if node.op == "placeholder")
        return cls(context, value_key, _outputs(graph, value_key), inputs, _split_ops(graph, context))

    def check(self, graph: fx.Graph, graph_pass: GraphPass) -> None:
        """Raise `_BrokenPromise` where the pass did not preserve one."""
        inputs = dict.fromkeys(node.name for node in graph.nodes if node.op == "placeholder")
        lost = [name for name in self.inputs if name not in inputs and not self.context.may_erase(name)]
        if lost:
            raise _BrokenPromise(f"it erased the input {lost[0]}; only weights may go")
        unknown = [name for name in inputs if name not in self.inputs and not self.context.was_added(name)]
        if unknown:
            raise _BrokenPromise(f"it added the input {unknown[0]}; new inputs come from context.concatenated")
        outputs = _outputs(graph, self.value_key)
        if len(outputs) != len(self.outputs):
            raise _BrokenPromise(f"the graph had {len(self.outputs)} outputs and now has {len(outputs)}")
        for index, (old, new) in enumerate(zip(self.outputs, outputs, strict=True)):
            if _described(old) != _described(new):
                raise _BrokenPromise(f"output {index} was {_described(old)} and now is {_described(new)}")
        split_ops = _split_ops(graph, self.context)
        if len(split_ops) != len(self.split_ops):
            raise _BrokenPromise(f"the graph had {len(self.split_ops)} split ops and now has {len(split_ops)}")
        if split_ops != self.split_ops and not graph_pass.replaces_split_ops:
            changed = next(pair for pair in zip(self.split_ops, split_ops, strict=True) if pair[0] != pair[1])
            raise _BrokenPromise(
                f"it put {changed[1]} in the place of {changed[0]} and does not say replaces_split_ops"
            )


def _outputs(graph: fx.Graph, value_key: str) -> tuple[Any, ...]:
    output = next(iter(reversed(graph.nodes)))
    if output.op != "output":
        raise _BrokenPromise(f"the last node is {output.name}, not the output")
    results = output.args[0] if isinstance(output.args[0], tuple | list) else output.args
    return tuple(result.meta.get(value_key) if isinstance(result, fx.Node) else result for result in results)


def _split_ops(graph: fx.Graph, context: PassContext) -> tuple[str, ...]:
    return tuple(op_name(node.target) for node in graph.nodes if context.is_split_op(node))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}] on {value.device}"
    return f"{type(value).__name__} {value}"
