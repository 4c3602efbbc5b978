"""Merge values that a graph computes more than once, such as the rotary tables of every layer.

Within a piece that always pays off. Across a cut it pays off if no more crosses: a piece reads the finished table
instead of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from piecegraph.passes.matching.effects import CONTIGUOUS, ELEMENTWISE, RESHAPE, VIEWS, Memory, erase_dead, view_source
from piecegraph.passes.matching.graph_pass import Miss, PassContext
from piecegraph.passes.matching.torch_ir import CASTS, CAT, CHUNK, GETITEM, SPLIT, is_tensor, value_of

_CHEAP = (
    (VIEWS | RESHAPE | CONTIGUOUS | CASTS | ELEMENTWISE | CAT | GETITEM | CHUNK | SPLIT)
    | {torch.matmul, torch.stack, torch.repeat_interleave, "matmul", "repeat_interleave", "repeat"}
) - {torch.where}  # takes one argument as well, and is another function then


def merge_repeated_values(graph: fx.Graph, context: PassContext) -> tuple[Miss, ...]:
    """Make equal calls of cheap functions one call, and return those that stay because more would cross the cut.

    The result is the same bit for bit. Calls that are no longer read stay, for the caller to erase.
    """
    segment_of = _segments(graph, context)
    for same in _classes(graph, by=segment_of.__getitem__):
        for node in same[1:]:
            node.replace_all_uses_with(same[0])
    erase_dead(graph, keep=filter(context.is_split_op, graph.nodes))
    classes = [same for same in _classes(graph, by=lambda node: 0) if len({segment_of[node] for node in same}) > 1]
    return _merge_across(classes, segment_of)


def _segments(graph: fx.Graph, context: PassContext) -> dict[fx.Node, int]:
    """Return the number of each node's segment between cuts; a split op is a segment of its own."""
    found: dict[fx.Node, int] = {}
    segment = 0
    for node in graph.nodes:
        is_split_op = context.is_split_op(node)
        segment += is_split_op
        found[node] = segment
        segment += is_split_op
    return found


def _classes(graph: fx.Graph, by: Any) -> list[list[fx.Node]]:
    """Return groups of nodes that compute the same, in the graph's order; compared are nodes of equal `by(node)`."""
    memory = Memory(graph)
    same: dict[object, list[fx.Node]] = {}
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if not _is_cheap(node) or any(user.op == "output" for user in node.users):
            continue
        if view_source(node) is None and any(map(memory.is_written, (node, *node.all_input_nodes))):
            continue  # what it is depends on when it is computed, or a copy of its own is needed
        if view_source(node) is None and memory.is_held_outside(node):
            continue  # outputs would become one memory
        key = (node.op, node.target, by(node), _key(node.args, first), _key(node.kwargs, first))
        alike = same.setdefault(key, [])
        alike.append(node)
        first[node] = alike[0]
    return [alike for alike in same.values() if len(alike) > 1]


def _is_cheap(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.target not in _CHEAP:
        return False
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return False
    return is_tensor(node) or isinstance(value_of(node), tuple | list)


def _key(value: Any, first: dict[fx.Node, fx.Node]) -> object:
    """Return a value that is equal for equal arguments: nodes by what they compute, numbers by their type as well."""
    match value:
        case fx.Node():
            return first.get(value, value)
        case tuple() | list():
            return (type(value).__name__, *(_key(item, first) for item in value))
        case dict():
            return tuple((name, _key(value[name], first)) for name in sorted(value))
        case slice():
            return ("slice", _key(value.start, first), _key(value.stop, first), _key(value.step, first))
        case float():
            return value.hex()
        case torch.SymInt():
            return str(value.node.expr)
    return (type(value).__name__, value)


def _merge_across(classes: Sequence[Sequence[fx.Node]], segment_of: dict[fx.Node, int]) -> tuple[Miss, ...]:
    first_of = {node: same[0] for same in classes for node in same}
    by_segment: dict[int, list[fx.Node]] = {}
    for node, first in first_of.items():
        if segment_of[node] > _home(first, first_of, segment_of):
            by_segment.setdefault(segment_of[node], []).append(node)
    accepted: list[fx.Node] = []
    misses: dict[fx.Node, Miss] = {}
    for segment, nodes in by_segment.items():
        for together in _connected(nodes, segment_of):
            read = _read_from_outside(together, segment, segment_of)
            needed = dict.fromkeys(first_of[node] for node in together if _outside_readers(node, together))
            needed = {each: None for each in needed if not _crosses_to(each, segment, segment_of, together)}
            if all(map(is_tensor, needed)) and len(needed) <= len(read) and _bytes(needed) <= _bytes(read):
                accepted += together
            elif _reads_what_crosses(together) and together[0] is not first_of[together[0]]:
                misses[together[0]] = Miss(
                    together[0].name,
                    f"equal to {first_of[together[0]].name} of an earlier piece, but reading that makes "
                    f"{len(needed)} tensors cross the cut where {len(read)} do",
                )
    chosen = {first_of[node] for node in accepted if node is not first_of[node]}
    position = {node: number for number, node in enumerate(segment_of)}
    for first in sorted(chosen, key=position.__getitem__):
        _move_home(first, first_of, segment_of)
    for node in accepted:
        if node is not first_of[node]:
            node.replace_all_uses_with(first_of[node])
    return tuple(misses[node] for node in sorted(misses, key=position.__getitem__))


def _home(first: fx.Node, first_of: dict[fx.Node, fx.Node], segment_of: dict[fx.Node, int]) -> int:
    """Return the earliest segment in which a value can be computed, so that all later pieces read it alike."""
    made_of = [first_of.get(each, each) for each in first.all_input_nodes if each.op != "placeholder"]
    if not made_of:
        return segment_of[first]
    return max(_home(each, first_of, segment_of) if each in first_of else segment_of[each] for each in made_of)


def _move_home(first: fx.Node, first_of: dict[fx.Node, fx.Node], segment_of: dict[fx.Node, int]) -> None:
    home = _home(first, first_of, segment_of)
    if home == segment_of[first]:
        return
    first.args = fx.map_arg(first.args, lambda node: first_of.get(node, node))
    position = {node: number for number, node in enumerate(first.graph.nodes)}
    last = max((each for each in first.all_input_nodes if each.op != "placeholder"), key=position.__getitem__)
    last.append(first)
    segment_of[first] = home


def _connected(nodes: Sequence[fx.Node], segment_of: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """Return the nodes of one segment in groups to be judged together: they read each other, or the same tensor."""
    groups: list[tuple[set[fx.Node], list[fx.Node]]] = []
    for node in nodes:
        touched = {node, *(each for each in node.all_input_nodes if each.op != "placeholder" and is_tensor(each))}
        joined: tuple[set[fx.Node], list[fx.Node]] = (touched, [node])
        for group in [group for group in groups if group[0] & touched]:
            groups.remove(group)
            joined = (group[0] | joined[0], group[1] + joined[1])
        groups.append(joined)
    return [members for _, members in groups]


def _read_from_outside(
    together: Sequence[fx.Node], segment: int, segment_of: dict[fx.Node, int]
) -> dict[fx.Node, None]:
    """Return the tensors that cross a cut for the sake of these nodes alone."""
    crossing = dict.fromkeys(
        each
        for node in together
        for each in node.all_input_nodes
        if each.op != "placeholder" and is_tensor(each) and segment_of[each] < segment
    )
    return {each: None for each in crossing if not _crosses_to(each, segment, segment_of, together)}


def _reads_what_crosses(together: Sequence[fx.Node]) -> bool:
    """Return whether the nodes read tensors that cross a cut. Otherwise they are made cheaply of sizes and inputs, and
    nobody expects them to cross."""
    made_of = [each for node in together for each in node.all_input_nodes if each not in together]
    return any(each.op != "placeholder" and is_tensor(each) for each in made_of)


def _crosses_to(node: fx.Node, segment: int, segment_of: dict[fx.Node, int], but_for: Sequence[fx.Node]) -> bool:
    return segment_of[node] < segment and any(
        segment_of[user] == segment and user not in but_for for user in node.users
    )


def _outside_readers(node: fx.Node, together: Sequence[fx.Node]) -> list[fx.Node]:
    return [user for user in node.users if user not in together]


def _bytes(nodes: Iterable[fx.Node]) -> int:
    """Return the approximate number of bytes; sizes that are symbols count as 64."""
    total = 0
    for node in nodes:
        size = value_of(node).numel()
        if isinstance(size, torch.SymInt):
            size = int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, 64)))
        total += size * value_of(node).element_size()
    return total
