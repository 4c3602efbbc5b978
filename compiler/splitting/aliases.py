"""Keep memory that several values of a graph share right across cuts.

A compiled piece may assume that its inputs do not overlap and that its outputs share no memory. So for memory that is
written after it crossed a cut, one value crosses: the tensor that the others are views of. Each piece remakes the
views it reads, and views that a split op or the caller reads are made between pieces. Where that tensor is not known,
or a view cannot be remade, the pieces concerned are marked, and run as their graphs.

Note [one value crosses for one memory]: this is the contract of a piece; `canonical_text` lists any exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.fake_values import computed_value, computing_on_fakes, fake_tensor
from piecegraph.compiler.splitting.normalize import IsSplitOp
from piecegraph.passes.matching.effects import is_pure, may_return, view_source, written_by
from piecegraph.passes.matching.torch_ir import GETITEM, is_call, is_tensor, value_of

BETWEEN = "piecegraph_between"
"""The key in `node.meta` of a view that is made between pieces."""

SegmentOf = Callable[[], Mapping[fx.Node, int]]
"""A function that returns the number of the segment of each call, by the cuts of the graph at the time."""

_VALUE = "piecegraph_alias_value"  # key in `meta` while an alias is looked for
_BEFORE, _AFTER = -1, 2**62  # the segments of the graph's inputs, and of the caller
_CHANGES_LAYOUT = frozenset(
    "as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_ swap_".split()
)


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensor with which a value shares its memory, and how the value can be remade from it."""

    tensor: fx.Node
    how: str  # "same": the value is that tensor; "view": repeating the call makes it; "unknown": it cannot be remade


@dataclass(slots=True)
class _Group:
    """The values that share one memory, in the graph's order."""

    members: list[fx.Node] = field(default_factory=list)
    roots: list[fx.Node] = field(default_factory=list)
    writers: list[fx.Node] = field(default_factory=list)
    is_opaque: bool = False  # some member cannot be remade


@dataclass(frozen=True, slots=True)
class Aliases:
    """The values of a graph that share memory that is written. `groups` numbers the memory of each such value."""

    groups: Mapping[fx.Node, int]
    written_inputs: tuple[fx.Node, ...]  # placeholders whose memory a call of the graph changes


def resolve_aliases(graph_module: fx.GraphModule, is_split_op: IsSplitOp, segment_of: SegmentOf) -> Aliases:
    """Rewrite `graph_module` in place so that one value crosses for one memory, wherever that is known to work.

    Returns the aliases of the rewritten graph: a piece with two values of one group among its inputs and outputs has
    to run as its graph.
    """
    graph = graph_module.graph
    sources = _Sources(is_split_op)
    suspects = _suspects(graph)
    if not suspects:
        return Aliases({}, ())
    for _ in range(4):  # a rewrite may move a cut
        groups = _groups(graph, suspects, sources)
        segments = segment_of()
        changed = [_regenerate(graph, group, segments, sources, is_split_op) for group in groups]
        if not any(changed):
            break
        suspects = _suspects(graph)
    segments = segment_of()
    crossing = [group for group in groups if _is_written_after_a_cut(group, segments)]
    _give_effects_a_value(graph, is_split_op, segments)
    graph.lint()
    graph_module.recompile()
    return Aliases(
        groups={node: number for number, group in enumerate(crossing) for node in group.members},
        written_inputs=tuple(
            node for group in groups if group.writers for node in group.members if node.op == "placeholder"
        ),
    )


def shared_positions(
    inputs: Sequence[fx.Node], outputs: Sequence[fx.Node | None], groups: Mapping[fx.Node, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the positions of a piece's inputs and outputs that share memory that is written.

    Positions count inputs, then outputs; there is a tuple for each memory with more than one. In `outputs`, None
    stands for an output that nobody reads.
    """
    found: dict[int, list[int]] = {}
    for position, node in enumerate((*inputs, *outputs)):
        if node is not None and node in groups:
            found.setdefault(groups[node], []).append(position)
    return tuple(tuple(positions) for positions in found.values() if len(positions) > 1)


def _give_effects_a_value(graph: fx.Graph, is_split_op: IsSplitOp, segments: Mapping[fx.Node, int]) -> None:
    """Add a result to each segment that only writes into its inputs (`x[0] = 1`), since a piece needs an output."""
    by_segment: dict[int, list[fx.Node]] = {}
    for node, segment in segments.items():
        by_segment.setdefault(segment, []).append(node)
    for nodes in by_segment.values():
        if is_split_op(nodes[0]) or any(isinstance(value_of(node), torch.Tensor) for node in nodes):
            continue
        for node in reversed(nodes):
            written = [each for each in written_by(node) if is_tensor(each)]
            if written:
                with graph.inserting_after(node):
                    seen = graph.call_method("detach", (written[0],))
                seen.meta["example_value"] = value_of(written[0])
                break


def _suspects(graph: fx.Graph) -> set[fx.Node]:
    """Return nodes that may share memory that is written, or visible to the caller twice: rather too many."""
    above: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while (up := above.get(node, node)) is not node:
            above[node] = above.get(up, up)
            node = up
        return node

    for one, other in _inputs_of_one_storage(graph):
        above[find(one)] = find(other)
    for node in graph.nodes:
        for source in may_return(node):
            above[find(node)] = find(source)
    marked = {find(written) for node in graph.nodes for written in written_by(node)}
    seen: dict[fx.Node, set[fx.Node]] = {}
    output = next(iter(reversed(graph.nodes)))
    for node in (*output.all_input_nodes, *graph.find_nodes(op="placeholder")):
        seen.setdefault(find(node), set()).add(node)
    results = {find(node) for node in output.all_input_nodes}
    marked |= {group for group, nodes in seen.items() if len(nodes) > 1 and group in results}
    return {node for node in graph.nodes if find(node) in marked} if marked else set()


def _inputs_of_one_storage(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Return pairs of placeholders in the same storage that may overlap, the later one first."""
    found: list[tuple[fx.Node, fx.Node]] = []
    by_storage: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            others = by_storage.setdefault(value.untyped_storage()._cdata, [])
            found += [(node, other) for other in others if _may_overlap(value, value_of(other))]
            others.append(node)
    return found


def _may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    spans = [_span(one), _span(other)]
    if None in spans:
        return True
    (a, b), (c, d) = spans  # type: ignore[misc]  # None is excluded above
    return a < d and c < b


def _span(value: torch.Tensor) -> tuple[int, int] | None:
    """Return the first byte and the end of a tensor in its storage; None for a tensor of symbolic size."""
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(number, int) for number in numbers):
        return None
    if 0 in value.shape:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    begin = int(value.storage_offset())
    return begin * value.element_size(), int(begin + last + 1) * value.element_size()


class _Sources:
    """The sources of the memory of calls; each call is examined once."""

    def __init__(self, is_split_op: IsSplitOp) -> None:
        self._is_split_op = is_split_op
        self._known: dict[fx.Node, _Source | None] = {}
        self._items: dict[fx.Node, list[_Source | None]] = {}

    def of(self, node: fx.Node) -> _Source | None:
        """Return the source of a call's memory; None for new memory, and for a value that is not a tensor."""
        if not is_tensor(node) or node.op not in ("call_function", "call_method"):
            return None
        if node not in self._known:
            self._known[node] = self._found(node)
        return self._known[node]

    def _found(self, node: fx.Node) -> _Source | None:
        if is_call(node, GETITEM) and isinstance(node.args[0], fx.Node) and not is_tensor(node.args[0]):
            producer, index = node.args[0], node.args[1]
            if producer.op == "placeholder" or not isinstance(index, int):
                return None
            items = self._items_of(producer)
            return items[index] if -len(items) <= index < len(items) else None
        if (parent := view_source(node)) is not None:
            return _Source(parent, "view")
        return next(iter(self._looked_up(node)), None)

    def _items_of(self, producer: fx.Node) -> list[_Source | None]:
        if producer not in self._items:
            self._items[producer] = self._looked_up(producer)
        return self._items[producer]

    def _looked_up(self, node: fx.Node) -> list[_Source | None]:
        """Return the source of each result of a call, found by calling it on fake tensors that share no memory."""
        candidates = [each for each in may_return(node) if is_tensor(each)]
        value = value_of(node)
        count = len(value) if isinstance(value, tuple | list) else 1
        if not candidates:
            return [None] * count
        unknown = _Source(candidates[0], "unknown")
        fakes = {each: value_of(each) for each in node.all_input_nodes}
        try:
            with computing_on_fakes(list(fakes.values())):
                for each, fake in fakes.items():
                    each.meta[_VALUE] = _apart(fake)
                result = _without_new_symbols(node)
        except Exception:
            return [unknown] * count
        finally:
            given = {each: each.meta.pop(_VALUE, None) for each in fakes}
        results = list(result) if isinstance(result, tuple | list) else [result]
        how = "view" if is_pure(node) and not self._is_split_op(node) else "unknown"
        return [_source_of(each, candidates, given, how) for each in results]


def _apart(value: Any) -> Any:
    """Return a fake tensor like `value` in its own memory; a value that is not a tensor is returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    mode = getattr(value, "fake_mode", None)
    assert mode is not None, "a traced graph's values are fake"
    return fake_tensor(
        mode,
        shape=value.shape,
        stride=value.stride(),
        offset=value.storage_offset(),
        dtype=value.dtype,
        device=value.device,
    )


def _without_new_symbols(node: fx.Node) -> Any:
    """Compute the value of a call, and ignore the unbacked symbols it may make."""
    shape_env = next(
        (env for each in node.all_input_nodes if (env := _shape_env(value_of(each))) is not None),
        None,
    )
    if shape_env is None:
        return computed_value(node, _VALUE)
    with shape_env.ignore_fresh_unbacked_symbols():
        return computed_value(node, _VALUE)


def _shape_env(value: Any) -> Any:
    return getattr(getattr(value, "fake_mode", None), "shape_env", None)


def _source_of(value: Any, candidates: Sequence[fx.Node], given: Mapping[fx.Node, Any], how: str) -> _Source | None:
    if not isinstance(value, torch.Tensor):
        return None
    storage = value.untyped_storage()._cdata
    for each in candidates:
        if value is given[each]:
            return _Source(each, "same")
        if given[each].untyped_storage()._cdata == storage:
            return _Source(each, how)
    return None


def _groups(graph: fx.Graph, suspects: Iterable[fx.Node], sources: _Sources) -> list[_Group]:
    """Group the suspects by the memory that they actually share."""
    above: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while above.get(node, node) is not node:
            node = above[node]
        return node

    suspected = set(suspects)
    for one, other in _inputs_of_one_storage(graph):
        above[find(one)] = find(other)
    tensors = [node for node in graph.nodes if node in suspected and is_tensor(node)]
    found: dict[fx.Node, _Group] = {}
    for node in tensors:
        if (source := sources.of(node)) is not None:
            above[find(node)] = find(source.tensor)
    for node in tensors:
        group = found.setdefault(find(node), _Group())
        group.members.append(node)
        source = sources.of(node)
        if source is None:
            group.roots.append(node)
        elif source.how == "unknown":
            group.is_opaque = True
    for node in graph.nodes:
        for written in written_by(node):
            if is_tensor(written) and written in suspected:
                group = found[find(written)]
                group.writers.append(node)
                group.is_opaque |= str(getattr(node.target, "__name__", node.target)) in _CHANGES_LAYOUT
    return list(found.values())


def _is_written_after_a_cut(group: _Group, segments: Mapping[fx.Node, int]) -> bool:
    """Return whether a value of the group is written after it crossed a cut, or is visible to the caller twice."""
    made = min(_segment(node, segments) for node in group.members)
    if any(_segment(writer, segments) > made for writer in group.writers):
        return True
    results = [node for node in group.members if any(user.op == "output" for user in node.users)]
    seen = {*results, *(node for node in group.members if node.op == "placeholder")}
    return bool(results) and len(seen) > 1


def _segment(node: fx.Node, segments: Mapping[fx.Node, int]) -> int:
    if node.op in ("placeholder", "get_attr"):
        return _BEFORE
    return _AFTER if node.op == "output" else segments.get(node, _BEFORE)


def _regenerate(
    graph: fx.Graph, group: _Group, segments: Mapping[fx.Node, int], sources: _Sources, is_split_op: IsSplitOp
) -> bool:
    """Make every reader after a cut read the root, or a view of it remade there. Return whether the graph changed."""
    if len(group.members) < 2 or len(group.roots) != 1 or group.is_opaque:
        return False
    if not _is_written_after_a_cut(group, segments):
        return False
    root, changed = group.roots[0], False
    made_in: dict[tuple[int, fx.Node], fx.Node] = {}

    def made(member: fx.Node, segment: int, reader: fx.Node) -> fx.Node:
        """Return the node that stands for `member` for a reader in a later segment."""
        source = sources.of(member)
        if source is None:
            return member
        if source.how == "same":
            return made(source.tensor, segment, reader)
        key = (segment, member)
        if key not in made_in:
            tensor = made(source.tensor, segment, reader)
            calls = [member]
            if (producer := _producer_of_views(member)) is not None:
                calls.insert(0, producer)
            new = {source.tensor: tensor}
            for call in calls:
                with graph.inserting_before(reader):
                    again = new[call] = graph.node_copy(call, lambda node: new.get(node, node))
                if reader.op == "output" or is_split_op(reader):
                    again.meta[BETWEEN] = True
                else:
                    again.meta.pop(BETWEEN, None)
            made_in[key] = again
        return made_in[key]

    for reader in list(graph.nodes):
        if reader.op == "placeholder" or reader.meta.get(BETWEEN):
            continue
        segment = _segment(reader, segments)
        for member in dict.fromkeys(reader.all_input_nodes):
            if member is root or member not in group.members or member.meta.get(BETWEEN):
                continue
            if _segment(member, segments) < segment:
                instead = made(member, segment, reader)
                if instead is not member:
                    reader.replace_input_with(member, instead)
                    changed = True
    _erase_unread(graph, group.members)
    return changed


def _erase_unread(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    for node in reversed(nodes):
        if node.op in ("call_function", "call_method") and not node.users and is_pure(node):
            producer = _producer_of_views(node)
            graph.erase_node(node)
            if producer is not None and not producer.users and is_pure(producer):
                graph.erase_node(producer)


def _producer_of_views(node: fx.Node) -> fx.Node | None:
    """Return the call that makes several views, `node` being an item of its result; None for any other call."""
    if is_call(node, GETITEM) and isinstance(node.args[0], fx.Node) and not is_tensor(node.args[0]):
        return node.args[0]
    return None
