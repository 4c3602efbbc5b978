"""Cut one graph at its split ops into pieces.

The order of the graph is kept, and with it the order of side effects. Arithmetic on sizes belongs to no piece: each
piece that needs such a value computes it from the declared sizes, which are the symbolic dims of the caller's tensors.
Otherwise a `2 * num_tokens` that layer 0 computes and layer 1 reads would make the pieces of the two layers differ. A
cut is also made where a further declared size is first read (for example `num_logits`, by the gather of the rows whose
logits are needed), so that the pieces before it depend on `num_tokens` alone.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.splitting.aliases import BETWEEN, shared_positions
from piecegraph.compiler.splitting.normalize import IsSplitOp, symbol_of, symbols_of
from piecegraph.errors import CompileError
from piecegraph.passes.matching.torch_ir import value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A maximal part of the graph between cuts.

    `graph_module` is a copy of this part: its placeholders stand for `inputs`, and its outputs for `outputs`.
    """

    index: int  # among all pieces of the graph
    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]  # nodes of the whole graph, in the order of their first use
    outputs: tuple[fx.Node, ...]  # nodes of the whole graph, in the order in which they are computed
    shared: tuple[tuple[int, ...], ...] = ()  # per shared memory that is written: positions in (*inputs, *outputs)


@dataclass(frozen=True, slots=True)
class Call:
    """One node that runs between pieces.

    It is a split op, an item of its result, a view (Note [one value crosses for one memory]), or arithmetic on sizes.
    """

    node: fx.Node
    is_split_op: bool


def segments_of(graph: fx.Graph, is_split_op: IsSplitOp) -> dict[fx.Node, int]:
    """Return, for each call of the graph, the number of its segment. A segment is a piece, or what runs between two."""
    segments = _segments(graph, is_split_op, _size_arithmetic(graph))
    return {node: number for number, nodes in enumerate(segments) for node in nodes}


def split(
    graph_module: fx.GraphModule, is_split_op: IsSplitOp, groups: Mapping[fx.Node, int] = MappingProxyType({})
) -> tuple[Piece | Call, ...]:
    """Split a graph into pieces and calls, in order: one call per split op, no empty pieces.

    `groups` maps each value that shares memory with others, if that memory is written, to a number for the memory
    (`Aliases.groups`). `graph_module` is not changed. Raises `CompileError` if a value that is neither a tensor nor a
    size would have to cross a cut.
    """
    graph = graph_module.graph
    size_arithmetic = _size_arithmetic(graph)
    segments = _segments(graph, is_split_op, size_arithmetic)
    segment_of = {node: number for number, nodes in enumerate(segments) for node in nodes}

    parts: list[Piece | Call] = []
    emitted: set[fx.Node] = set()

    def emit_sizes(nodes: Sequence[fx.Node]) -> None:
        """Emit, once each, the calls that compute the sizes among `nodes`."""
        for size in nodes:
            if size in size_arithmetic and size not in emitted:
                emit_sizes(size.all_input_nodes)
                emitted.add(size)
                parts.append(Call(size, is_split_op=False))

    num_pieces = 0
    for number, nodes in enumerate(segments):
        if is_split_op(nodes[0]) or nodes[0].meta.get(BETWEEN):
            emit_sizes(nodes[0].all_input_nodes)
            parts.extend(Call(node, is_split_op=is_split_op(node)) for node in nodes)
            continue
        outputs = tuple(
            node for node in nodes if any(segment_of.get(user) != number for user in _readers(node, size_arithmetic))
        )
        if not outputs:
            tensors = [node for node in nodes if isinstance(value_of(node), torch.Tensor)]
            if not tensors:
                continue
            # Nothing reads the piece, so it has side effects; a compiled graph needs an output.
            outputs = (tensors[-1],)
        for node in outputs:
            if not isinstance(value_of(node), torch.Tensor | torch.SymInt | torch.SymFloat):
                if str(getattr(node.target, "__name__", node.target)).lstrip("_").startswith("enter_"):
                    raise CompileError(
                        f"a split op lies inside a `with` block of forward ({node.name}), which would begin in one "
                        "piece and end in another. Put the `with` around the call of the model, or around parts that "
                        "hold no split op."
                    )
                raise CompileError(
                    f"{node.name} ({node.target}) makes a {type(value_of(node)).__name__} that crosses a cut; "
                    "only tensors and sizes can. Name other split_ops, or unpack the value before the split op."
                )
        piece = _extract(graph_module, num_pieces, nodes, outputs, size_arithmetic)
        read_later = [node if node.users else None for node in outputs]  # None: kept for its side effect only
        shared = shared_positions(piece.inputs, read_later, groups) if groups else ()
        parts.append(replace(piece, shared=shared))
        num_pieces += 1
    output = next(iter(reversed(graph.nodes)))
    emit_sizes(output.all_input_nodes)
    return tuple(parts)


def _size_arithmetic(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that compute a size or a condition from sizes alone; they may be computed in any place."""
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
    """Return the users of a node, except those that each piece computes again by itself."""
    return [user for user in node.users if user not in size_arithmetic]


def _segments(graph: fx.Graph, is_split_op: IsSplitOp, size_arithmetic: set[fx.Node]) -> list[list[fx.Node]]:
    """Return the calls of the graph, size arithmetic aside, as segments in order.

    A segment is the calls of one piece, a split op with the items taken from its result, or a view that is made between
    pieces (`BETWEEN`).
    """
    segments: list[list[fx.Node]] = []
    current: list[fx.Node] = []
    seen_sizes: frozenset[str] = frozenset()
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in size_arithmetic:
            continue
        if is_split_op(node) or node.meta.get(BETWEEN):
            segments += [current, [node]]
            current = []
            continue
        if not current and segments and is_split_op(segments[-1][0]) and _is_item_of(node, segments[-1][0]):
            segments[-1].append(node)  # one of several results of the split op
            continue
        sizes = _argument_sizes(node)
        if not sizes <= seen_sizes:
            if seen_sizes:  # a further size: cut here, so that the pieces before do not depend on it
                segments.append(current)
                current = []
            seen_sizes |= sizes
        current.append(node)
    segments.append(current)
    return [segment for segment in segments if segment]


def _is_item_of(node: fx.Node, producer: fx.Node) -> bool:
    """Return whether `node` takes an item of the tuple that `producer` returns."""
    return node.target is operator.getitem and node.args[0] is producer and isinstance(value_of(producer), tuple | list)


def _argument_sizes(node: fx.Node) -> frozenset[str]:
    """Return the size symbols in the shapes of those of the caller's tensors that this node reads directly."""
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
    """Return a piece with copies of `nodes`, whose inputs are the values and sizes that they need."""
    graph = fx.Graph()
    copy_of: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    attributes: dict[str, Any] = {}
    inside = set(nodes)

    def need(node: fx.Node) -> None:
        """Make a value from outside available: as an input, as an attribute, or through the sizes it is made of."""
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
        """Return the copy of a node; the size arithmetic that it reads is copied, too."""
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
    """Return the size inputs that a piece needs although none of its nodes reads them.

    A piece needs `num_tokens` as an input if a tensor has, say, `2 * num_tokens` rows and no tensor has a dim or stride
    of `num_tokens` from which it could be read.
    """
    made_of: set[str] = set()  # symbols in any dim, stride or size
    plain: set[str | None] = set()  # symbols that are such a value by themselves
    for node in inputs:
        value = value_of(node)
        for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            plain.add(symbol_of(size))
            made_of |= symbols_of(size)
    return [node for node in graph.nodes if node.op == "placeholder" and symbol_of(value_of(node)) in made_of - plain]


def attribute_of(module: Any, path: str) -> Any:
    """Return the attribute at the dotted `path` in `module`."""
    for part in path.split("."):
        module = getattr(module, part)
    return module
