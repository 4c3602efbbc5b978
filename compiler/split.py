"""Cut one graph at its split ops into pieces.

The order of the graph is kept, so effects keep theirs. Arithmetic on sizes belongs to no piece: each
piece that needs such a value computes it from the declared sizes, so that `2 * num_tokens` made in
layer 0 does not make layer 1 differ. A cut is also made where a further declared size enters (the
gather of the rows to sample, say): pieces before it then depend on `num_tokens` alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.normalize import IsSplitOp, symbol_of, symbols_of
from piecegraph.errors import CompileError
from piecegraph.passes.torch_ir import value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A maximal part of the graph between cuts.

    `graph_module`'s placeholders stand for `inputs` and its output tuple for `outputs`, both nodes of
    the whole graph, in order of first use and of production.
    """

    index: int
    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One node run between pieces: a split op, an item of its result, or arithmetic on sizes."""

    node: fx.Node
    is_split_op: bool


def split(graph_module: fx.GraphModule, is_split_op: IsSplitOp) -> tuple[Piece | Call, ...]:
    """Pieces and calls, in order; one call per split op, no empty pieces.

    `graph_module` is not changed. Raises `CompileError` where a value that is neither a tensor nor a
    size would have to cross a cut.
    """
    graph = graph_module.graph
    size_arithmetic = _size_arithmetic(graph)
    segments = _segments(graph, is_split_op, size_arithmetic)
    segment_of = {node: number for number, nodes in enumerate(segments) for node in nodes}

    parts: list[Piece | Call] = []
    emitted: set[fx.Node] = set()

    def emit_sizes(nodes: Sequence[fx.Node]) -> None:
        for size in nodes:
            if size in size_arithmetic and size not in emitted:
                emit_sizes(size.all_input_nodes)
                emitted.add(size)
                parts.append(Call(size, is_split_op=False))

    num_pieces = 0
    for number, nodes in enumerate(segments):
        if is_split_op(nodes[0]):
            emit_sizes(nodes[0].all_input_nodes)
            parts.extend(Call(node, is_split_op=is_split_op(node)) for node in nodes)
            continue
        outputs = tuple(
            node for node in nodes if any(segment_of.get(user) != number for user in _readers(node, size_arithmetic))
        )
        if not outputs:
            mutating = [node for node in nodes if isinstance(value_of(node), torch.Tensor)]
            if not mutating:
                continue
            outputs = (mutating[-1],)  # kept for its effect; something must come out of a compiled graph
        for node in outputs:
            if not isinstance(value_of(node), torch.Tensor | torch.SymInt | torch.SymFloat):
                raise CompileError(
                    f"{node.name} ({node.target}) makes a {type(value_of(node)).__name__} that crosses a cut; "
                    "only tensors and sizes can. Name other split_ops, or unpack the value before the split op."
                )
        parts.append(_extract(graph_module, num_pieces, nodes, outputs, size_arithmetic))
        num_pieces += 1
    output = next(iter(reversed(graph.nodes)))
    emit_sizes(output.all_input_nodes)
    return tuple(parts)


def _size_arithmetic(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that make a size out of sizes alone: free to compute anywhere."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if not isinstance(value_of(node), torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool):
            continue
        inputs = node.all_input_nodes
        if inputs and all(
            n in found or (n.op == "placeholder" and isinstance(value_of(n), torch.SymInt)) for n in inputs
        ):
            found.add(node)
    return found


def _readers(node: fx.Node, size_arithmetic: set[fx.Node]) -> list[fx.Node]:
    return [user for user in node.users if user not in size_arithmetic]


def _segments(graph: fx.Graph, is_split_op: IsSplitOp, size_arithmetic: set[fx.Node]) -> list[list[fx.Node]]:
    """Runs of nodes between cuts; a split op and the items taken from its result are a segment of their own."""
    segments: list[list[fx.Node]] = []
    current: list[fx.Node] = []
    seen_sizes: frozenset[str] = frozenset()
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in size_arithmetic:
            continue
        if is_split_op(node):
            segments += [current, [node]]
            current = []
            continue
        if not current and segments and is_split_op(segments[-1][0]) and _is_item_of(node, segments[-1][0]):
            segments[-1].append(node)  # a result of the split op, one of several
            continue
        sizes = _argument_sizes(node)
        if not sizes <= seen_sizes:
            if seen_sizes:
                segments.append(current)
                current = []
            seen_sizes |= sizes
        current.append(node)
    segments.append(current)
    return [segment for segment in segments if segment]


def _is_item_of(node: fx.Node, producer: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0] is producer and isinstance(value_of(producer), tuple | list)


def _argument_sizes(node: fx.Node) -> frozenset[str]:
    """Symbols of the caller's tensors that this node reads directly."""
    found = set()
    for read in node.all_input_nodes:
        value = value_of(read)
        if read.op == "placeholder" and isinstance(value, torch.Tensor):
            found |= {symbol for size in value.shape if (symbol := symbol_of(size)) is not None}
    return frozenset(found)


def _extract(
    graph_module: fx.GraphModule,
    index: int,
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    size_arithmetic: set[fx.Node],
) -> Piece:
    graph = fx.Graph()
    copy_of: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    attributes: dict[str, Any] = {}
    inside = set(nodes)

    def need(node: fx.Node) -> None:
        if node in copy_of or node in inside:
            return
        if node in size_arithmetic:
            for read in node.all_input_nodes:
                need(read)
            return
        if node.op == "get_attr":
            attributes[str(node.target)] = attribute_of(graph_module, str(node.target))
            return
        inputs.append(node)
        placeholder = graph.placeholder(node.name)
        placeholder.meta = {"example_value": value_of(node)}
        copy_of[node] = placeholder

    def copied(node: fx.Node) -> fx.Node:
        if node not in copy_of:
            for read in node.all_input_nodes:
                copied(read)
            copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
        return copy_of[node]

    for node in nodes:
        for read in node.all_input_nodes:
            need(read)
    for size in _sizes_to_pass(graph_module.graph, inputs):
        need(size)
    for node in nodes:
        copied(node)
    result = graph.output(tuple(copy_of[node] for node in outputs))
    result.meta = {}
    piece = fx.GraphModule(attributes, graph, class_name=f"Piece{index}")
    return Piece(index=index, graph_module=piece, inputs=tuple(inputs), outputs=tuple(outputs))


def _sizes_to_pass(graph: fx.Graph, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Size inputs a piece needs although none of its nodes reads them: its tensors' sizes are made of
    them, and no tensor has such a size by itself (all it gets is `2 * num_tokens` rows, say)."""
    made_of: set[str] = set()
    plain: set[str | None] = set()
    for node in inputs:
        value = value_of(node)
        for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            plain.add(symbol_of(size))
            made_of |= symbols_of(size)
    return [node for node in graph.nodes if node.op == "placeholder" and symbol_of(value_of(node)) in made_of - plain]


def attribute_of(module: Any, path: str) -> Any:
    """What `path` (dotted) is in `module`."""
    for part in path.split("."):
        module = getattr(module, part)
    return module
