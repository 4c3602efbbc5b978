"""`select-rows-early`: compute only the rows that sample after the last attention.

A model computes its last layer and its final norm for every row, and then takes the rows whose logits are wanted. Both
work row by row, so the rows can be taken first: a few of thousands in a prefill. The last attention itself needs every
row.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from piecegraph.passes.matching.effects import (
    CONTIGUOUS,
    RESHAPE,
    SQUEEZE,
    UNSQUEEZE,
    VIEW,
    Memory,
    erase_dead,
    is_pure,
)
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.row_wise import MATMULS, REDUCTIONS, SIZED_VIEWS, Rows, row_operands, sized_for
from piecegraph.passes.matching.torch_ir import (
    ADD,
    GETITEM,
    TRANSPOSE,
    NoMatch,
    cast_source,
    dtype_of,
    is_call,
    is_tensor,
    same_size,
    value_of,
)

_INDEX_SELECT = frozenset({torch.index_select, "index_select"})
_LAYOUT = VIEW | RESHAPE | SQUEEZE | UNSQUEEZE | CONTIGUOUS | TRANSPOSE
_SIZE_QUERIES = frozenset({"size", torch.Size})


@dataclass(frozen=True, slots=True)
class SelectRowsEarly(GraphPass):
    """A pass that moves the choice of rows before the calls that work row by row.

    A site is `hidden[:, logits_indices, :]`: rows of a tensor, chosen by an input of a declared size of its own, where
    the tensor is computed row by row. The choice moves back as far as the last split op, and selects from the tensors
    that are read there. A call that others read too stays where it is.

    The result is exact except for matmuls, which libraries may sum in another order for another number of rows.
    """

    name: ClassVar[str] = "select-rows-early"

    through_matmuls: bool = True
    """Whether matmuls run on the chosen rows; if False, only the final norm does.

    True saves most of one layer in every step that does not sample all rows. In a decode step, which samples all rows,
    it costs one more gather (of the last attention's output). The pieces of the other layers are the same either way.
    With True there is one piece less to compile, because the end of the last layer belongs to the piece of the logits.
    """

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for node in list(graph.nodes):
            choice = _choice_of_rows(node)
            if choice is None:
                continue
            since = _SinceSplitOp.last_split_op(choice, context)
            if not context.is_split_op(since.start):
                continue  # a graph without layers, in which `index` may choose more rows than `source` has
            try:
                rows = _region(choice, since, self.through_matmuls)
            except NoMatch as reason:
                misses.append(Miss(node.name, str(reason)))
                continue
            _move_ahead(choice, rows, since)
            matches += 1
        if matches:
            erase_dead(graph, keep=[node for node in graph.nodes if context.is_split_op(node)])
        return PassResult(matches=matches, misses=tuple(misses))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice of rows: `source[:, index, :]`."""

    node: fx.Node
    source: fx.Node
    dim: int
    index: fx.Node  # a placeholder, [num_logits] of integers

    def of(self, source: fx.Node, dim: int, after: fx.Node) -> fx.Node:
        """Insert the same choice of rows of another tensor after the node `after`, and return it."""
        with source.graph.inserting_after(after):
            if is_call(self.node, _INDEX_SELECT):
                return source.graph.call_function(torch.index_select, (source, dim, self.index))
            index: Any = (*[slice(None)] * dim, self.index)
            return source.graph.call_function(operator.getitem, (source, index))


def _choice_of_rows(node: fx.Node) -> _Choice | None:
    """Return the choice if the call takes rows of a computed tensor by an input of another size, else None."""
    if is_call(node, _INDEX_SELECT) and len(node.args) == 3:
        source, dim, index = node.args
    elif is_call(node, GETITEM) and is_tensor(node.args[0]):
        source = node.args[0]
        parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        places = [place for place, part in enumerate(parts) if isinstance(part, fx.Node)]
        others = [part for part in parts if not isinstance(part, fx.Node)]
        if len(places) != 1 or not all(part is Ellipsis or part == slice(None) for part in others):
            return None
        (dim,) = places
        index = parts[dim]
        if Ellipsis in parts[:dim]:
            dim += len(value_of(source).shape) - len(parts)
    else:
        return None
    if not (is_tensor(source) and is_tensor(index) and isinstance(dim, int)) or source.op == "placeholder":
        return None
    chosen = value_of(index)
    if index.op != "placeholder" or chosen.dim() != 1 or chosen.dtype not in (torch.int64, torch.int32):
        return None
    dim %= len(value_of(source).shape)
    rows = value_of(source).shape[dim]
    if not isinstance(rows, torch.SymInt) or same_size(rows, chosen.shape[0]):
        return None
    return _Choice(node, source, dim, index)


def _region(choice: _Choice, since: _SinceSplitOp, through_matmuls: bool) -> Rows:
    """Return the calls that can run on chosen rows, in the graph's order; no other call reads them.

    Raises `NoMatch` with the reason if there is none.
    """
    memory = Memory(choice.node.graph, writers=since.nodes)
    found: Rows = {}
    wanted: Rows = {choice.source: choice.dim}  # what is read row by row
    whole: set[fx.Node] = set()  # what is read as it is
    reason = f"{choice.source.name} is not computed after the last split op"
    for node in reversed(since.nodes):
        if node not in wanted:
            continue
        try:
            operands = _operands_on_rows(node, wanted[node], found, choice, memory, whole, through_matmuls)
            if any(wanted.get(each, dim) != dim for each, dim in operands.items()):
                raise NoMatch(f"{node.name} reads rows of another dim")
        except NoMatch as refusal:
            reason = str(refusal) if not found else reason
            continue
        found[node] = wanted[node]
        wanted.update(operands)
        whole.update(each for each in node.all_input_nodes if each not in operands)
    _drop_unprofitable(found, since)
    if choice.source not in found:
        raise NoMatch(reason)
    return dict(reversed(found.items()))


@dataclass(frozen=True, slots=True)
class _SinceSplitOp:
    """The nodes between the last split op and the choice."""

    start: fx.Node  # the split op; without one, the last placeholder
    nodes: list[fx.Node]

    @classmethod
    def last_split_op(cls, choice: _Choice, context: PassContext) -> _SinceSplitOp:
        start = choice.index
        nodes: list[fx.Node] = []
        for node in choice.node.graph.nodes:
            if node is choice.node:
                break
            if node.op == "placeholder" or context.is_split_op(node):
                start, nodes = node, []
            else:
                nodes.append(node)
        return cls(start, nodes)


def _operands_on_rows(
    node: fx.Node,
    dim: int,
    found: Rows,
    choice: _Choice,
    memory: Memory,
    whole: set[fx.Node],
    through_matmuls: bool,
) -> Rows:
    for user in node.users:
        if user not in found and user is not choice.node and not _is_unneeded(user, found):
            raise NoMatch(f"{node.name} is also read by {user.name}")
    if node in whole:
        raise NoMatch(f"{node.name} is read by more than its rows")
    if not through_matmuls and node.target in MATMULS:
        raise NoMatch(f"{node.name} is a matmul (through_matmuls=False)")
    for each in (node, *node.all_input_nodes):
        if memory.is_written(each):
            raise NoMatch(f"{node.name} would be computed after {each.name} is changed in place")
    return row_operands(node, dim)


def _is_unneeded(node: fx.Node, found: Rows) -> bool:
    """Return whether no call reads the node, or whether it only asks for sizes that views in `found` no longer need."""
    if not node.users:
        return is_pure(node)
    return is_call(node, _SIZE_QUERIES) and all(user in found and user.target in SIZED_VIEWS for user in node.users)


def _drop_unprofitable(found: Rows, since: _SinceSplitOp) -> None:
    """Remove nodes from `found` that would not become cheaper.

    If the choice cannot move back to the split op, moving it before a view gains nothing (it copies as much), and
    moving it before an add, a reduction or a narrowing cast costs more (it copies more).
    """
    computed = set(since.nodes)
    for node in reversed(list(found)):
        operands = row_operands(node, found[node])
        if any(each not in found and not is_tensor(each) for each in operands):
            del found[node]  # an item of a tuple; rows are those of a tensor
            continue
        if any(each in found or each not in computed for each in operands):
            continue
        is_sum = node.target in ADD and len(operands) > 1
        if node.target in _LAYOUT | REDUCTIONS or is_sum or _is_narrowing(node):
            del found[node]


def _is_narrowing(node: fx.Node) -> bool:
    source = cast_source(node)
    return source is not None and dtype_of(node).itemsize < dtype_of(source).itemsize


def _move_ahead(choice: _Choice, rows: Rows, since: _SinceSplitOp) -> None:
    """Run the nodes in `rows` on chosen rows.

    The choice is inserted as early as possible, because the graph is cut there: calls that read only weights then
    belong to the piece after the cut, and need no piece of their own before it. Calls in `rows` that lie before the
    choice are moved after it.
    """
    operands = {node: row_operands(node, dim) for node, dim in rows.items()}
    chosen_from = {each: dim for read in operands.values() for each, dim in read.items() if each not in rows}
    position = {node: number for number, node in enumerate(since.nodes)}
    at = max((each for each in chosen_from if each in position), key=position.__getitem__, default=since.start)
    behind = [node for node in rows if position[node] < position.get(at, -1)]
    chosen = {}
    for source, dim in chosen_from.items():
        at = chosen[source] = choice.of(source, dim, at)
    for node in behind:
        at.append(node)
        at = node
    for node, dim in rows.items():
        if node.target in SIZED_VIEWS:
            _reshape(node, sized_for(node, dim))
        for operand in operands[node]:
            if operand in chosen:
                node.replace_input_with(operand, chosen[operand])
        node.meta.pop("example_value", None)
    choice.node.replace_all_uses_with(choice.source)
    choice.node.graph.erase_node(choice.node)


def _reshape(node: fx.Node, arguments: Sequence[Any]) -> None:
    """Turn a view into a reshape, because the chosen rows may not be contiguous."""
    node.op, node.target = "call_method", "reshape"
    node.args, node.kwargs = tuple(arguments), {}
