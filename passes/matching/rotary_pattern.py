"""The pattern of a rotated query or key, followed back through rotary embedding and norm to its projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import CONTIGUOUS, RESHAPE, SQUEEZE, UNSQUEEZE
from piecegraph.passes.matching.torch_ir import Columns, NoMatch
from piecegraph.passes.ops.rms_norm import RMS_NORM

Layout = tuple[str, ...]
"""The names of a tensor's dims: `"tokens"`, `"heads"`, `"dim"`, and `"one"` for a dim of size 1."""

ATTENTION_LAYOUT: Layout = ("tokens", "heads", "dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """An RMS norm over each head: `x / rms(x) * (offset + weight)`."""

    weight: fx.Node | None
    eps: float
    offset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedHeads:
    """The heads that become an argument of attention by an optional norm and by `x * cos + cat(-x2, x1) * sin`."""

    heads: Columns  # as they were projected
    layout: Layout  # of `heads`
    norm: HeadNorm | None
    cos: fx.Node  # [1, tokens, rotary_dim], or without the first dim; of the widest dtype they were cast from
    sin: fx.Node
    read: Columns  # what is normed or rotated: `heads` in another layout or dtype
    inner: tuple[fx.Node, ...]  # what lies between `read` and attention
    views: tuple[fx.Node, ...]  # what lies between `heads` and `read`, that included if it is not `heads`


def rotated_heads(node: fx.Node) -> RotatedHeads:
    """Return the heads that an argument of attention `[tokens, heads, dim]` is made of. Raises `NoMatch`."""
    walk = _Walk(node)
    walk.up()
    if _is_norm(walk.node):
        raise NoMatch(f"{walk.node} norms its heads, and nothing rotates them afterwards")
    cos, sin = walk.through_rotary()
    between = walk.mark()
    walk.up()
    if _is_norm(walk.node):
        norm = walk.through_norm()
        between = walk.mark()
        walk.up()
    else:
        norm = None
    if ir.dtype_of(walk.node) != ir.dtype_of(node):
        raise NoMatch(f"{walk.node} is {ir.dtype_of(walk.node)}, and attention is given {ir.dtype_of(node)}")
    read, num_inner = between
    return RotatedHeads(
        heads=Columns(walk.node, walk.start, walk.stop),
        layout=walk.layout,
        norm=norm,
        cos=cos,
        sin=sin,
        read=read,
        inner=tuple(dict.fromkeys(walk.inner[:num_inner])),
        views=tuple(dict.fromkeys(walk.inner[num_inner:])),
    )


class _Walk:
    """A position on the way back through the graph: numbers `start:stop` of the last dim of `node`."""

    def __init__(self, node: fx.Node) -> None:
        size = ir.last_dim(node)
        if size is None:
            raise NoMatch(f"the size of a head of {node} is not a constant")
        self.node = node
        self.layout = ATTENTION_LAYOUT
        self.start, self.stop = 0, size
        self.inner: list[fx.Node] = []

    def mark(self) -> tuple[Columns, int]:
        """Return the current columns, and how many nodes were passed."""
        return Columns(self.node, self.start, self.stop), len(self.inner)

    def up(self) -> None:
        """Move up as long as `node` is only another layout, dtype or part of its source."""
        while (source := self._source()) is not None:
            self.inner += [self.node]
            self.node = source

    def _source(self) -> fx.Node | None:
        """Return the source of the current node and adjust the layout; None if the node computes or regroups."""
        node, layout = self.node, self.layout
        if (swapped := ir.swapped_dims(node)) is not None:
            above, one, other = swapped
            dims = list(layout)
            dims[one], dims[other] = dims[other], dims[one]
            if dims[-1] != "dim":
                return None
            self.layout = tuple(dims)
            return above
        if ir.is_call(node, SQUEEZE) and isinstance(dim := ir.argument(node, 1, "dim"), int):
            above = _first(node)
            dim %= len(ir.shape_of(above))
            if len(ir.shape_of(above)) == len(layout) + 1:
                self.layout = (*layout[:dim], "one", *layout[dim:])
                return above
            return None
        if ir.is_call(node, CONTIGUOUS):
            return _first(node)
        if (source := ir.cast_source(node)) is not None and ir.dtype_of(source).is_floating_point:
            return source
        if (columns := ir.columns_of(node)) is not None:
            self.start, self.stop = self.start + columns.start, self.stop + columns.start
            return columns.source
        return None

    def through_rotary(self) -> tuple[fx.Node, fx.Node]:
        """Move up through the rotary embedding, and return its tables (cos, sin). Raises `NoMatch`."""
        node = self.node
        if self.start != 0 or self.stop != ir.last_dim(node):
            raise NoMatch(f"attention is given a part of {node}")
        kept: tuple[fx.Node, int, int] | None = None
        rotated: Any = node
        if ir.is_call(node, ir.CAT):
            parts = ir.argument(node, 0, "tensors")
            if len(parts) != 2 or not ir.is_last_dim(ir.argument(node, 1, "dim", 0), len(ir.shape_of(node))):
                raise NoMatch(
                    f"{node} joins {len(parts)} parts; wanted are those that are rotated and those that are not"
                )
            rotated, rest = parts
            kept = self._part(rest)
        x, cos, sin = self._rotation(rotated)
        root, start, stop = self._part(x)
        if kept is not None:
            if kept[:2] != (root, stop):
                raise NoMatch(
                    f"{node} joins {rotated}, which is rotated, and {rest}, which is not the rest of the same heads"
                )
            stop = kept[2]
        self.inner.append(node)
        self.node, self.start, self.stop = root, start, stop
        return cos, sin

    def _rotation(self, node: Any) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return (x, cos, sin) of `x * cos + cat(-x2, x1) * sin`. Raises `NoMatch`."""
        self._note(node)
        node = self._uncast(node)
        summands = ir.operands(node, ir.ADD)
        if summands is None:
            raise NoMatch(f"{node} is not a rotary embedding, x * cos + cat(-x2, x1) * sin")
        products = [ir.operands(self._uncast(each), ir.MUL) for each in summands]
        turned = [self._turned(product) for product in products]
        for this, other in ((0, 1), (1, 0)):
            found, product = turned[this], products[other]
            if found is None or product is None or turned[other] is not None:
                continue
            x_of_turned, sin = found
            for x, cos in (product, product[::-1]):
                if ir.is_tensor(x) and ir.is_tensor(cos) and self._part(x) == x_of_turned:
                    self.inner += [node, *filter(ir.is_tensor, summands)]
                    size = x_of_turned[2] - x_of_turned[1]
                    return x, self._table(cos, size), self._table(sin, size)
        if any(product is not None and any(map(_is_interleaved, product)) for product in products):
            raise NoMatch(f"{node} rotates numbers next to each other (interleaved); wanted is half against half")
        raise NoMatch(f"{node} is not a rotary embedding, x * cos + cat(-x2, x1) * sin")

    def _turned(self, product: tuple[Any, Any] | None) -> tuple[tuple[fx.Node, int, int], Any] | None:
        """Return the part of a product whose halves are swapped, one negated, and the factor it is multiplied by; else
        None."""
        for joined, factor in () if product is None else (product, product[::-1]):
            joined = self._uncast(joined)
            if not ir.is_call(joined, ir.CAT):
                continue
            parts = ir.argument(joined, 0, "tensors")
            if len(parts) != 2 or not ir.is_last_dim(ir.argument(joined, 1, "dim", 0), len(ir.shape_of(joined))):
                continue
            negated, first = parts
            if not ir.is_call(negated, ir.NEG) or not ir.is_tensor(first):
                continue
            root, middle, end = self._part(negated.args[0])
            other_root, start, other_middle = self._part(first)
            if other_root is root and other_middle == middle and end - middle == middle - start > 0:
                self.inner += [joined, negated]
                return (root, start, end), factor
        return None

    def _part(self, node: Any) -> tuple[fx.Node, int, int]:
        """Return (source, start, stop): the columns that a node is, whatever slices and casts are between."""
        if not ir.is_tensor(node) or (size := ir.last_dim(node)) is None:
            raise NoMatch(f"{node} is not a tensor whose last dim has a constant size")
        start, stop = 0, size
        while True:
            columns = ir.columns_of(node)
            if columns is not None:
                source, start, stop = columns.source, start + columns.start, stop + columns.start
            else:
                plain = ir.strip_widening(node)
                if plain is node:
                    return node, start, stop
                source = plain
            self._note(node)
            node = source

    def _table(self, node: Any, size: int) -> fx.Node:
        """Return the source of a table `[1, tokens, size]` that is the same for all heads, without roundings.

        Raises `NoMatch`.
        """
        wanted = f"wanted is [1, tokens, {size}], with a dim for the heads put in"
        added: list[int] = []
        while ir.is_tensor(node):
            source = ir.cast_source(node)
            if ir.is_call(node, UNSQUEEZE) and isinstance(dim := ir.argument(node, 1, "dim"), int):
                source = _first(node)
                added.append(dim % len(ir.shape_of(node)))
            if source is None or not ir.dtype_of(source).is_floating_point:
                break
            self._note(node)
            node = source
        if not ir.is_tensor(node):
            raise NoMatch(f"{node} is not a table of cosines or sines; {wanted}")
        if _is_interleaved(node):
            raise NoMatch(f"{node} is a table for numbers next to each other (interleaved), not half against half")
        shape = tuple(ir.shape_of(node))
        heads_at, tokens = self.layout.index("heads"), ir.shape_of(self.node)[self.layout.index("tokens")]
        sizes = (1, tokens, size) if len(self.layout) == 4 else (tokens, size)
        if added != [heads_at] or len(shape) != len(sizes) or not all(map(ir.same_size, shape, sizes)):
            raise NoMatch(f"{node} is a table {list(shape)}; {wanted}")
        return node

    def through_norm(self) -> HeadNorm:
        """Move up from a norm's result to its input, and return the norm. Raises `NoMatch`."""
        node = self.node
        if (self.start, self.stop) != (0, ir.last_dim(node)):
            raise NoMatch(f"{node} norms more than a head of {self.stop - self.start} at once")
        x, weight, eps, offset = node.args
        assert isinstance(x, fx.Node) and isinstance(weight, fx.Node | None), node
        assert isinstance(eps, float) and isinstance(offset, float), node
        self.inner.append(node)
        self.node = x
        return HeadNorm(weight=weight, eps=eps, offset=offset)

    def _uncast(self, node: Any) -> Any:
        """Return the node without casts between floats."""
        while (source := ir.cast_source(node)) is not None and ir.dtype_of(source).is_floating_point:
            self._note(node)
            node = source
        return node

    def _note(self, node: Any) -> None:
        if ir.is_tensor(node):
            self.inner.append(node)


def _first(node: fx.Node) -> fx.Node:
    """Return the tensor that a method is called on, or the first argument of a function."""
    source = node.args[0]
    assert isinstance(source, fx.Node), node
    return source


def _is_norm(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is RMS_NORM


def _is_interleaved(node: Any) -> bool:
    """Return whether a node puts numbers next to each other: a flattened stack, or repeated numbers."""
    while ir.cast_source(node) is not None or ir.is_call(node, UNSQUEEZE):
        node = node.args[0]
    if ir.is_call(node, frozenset({torch.repeat_interleave, "repeat_interleave"})):
        return True
    return ir.is_call(node, RESHAPE) and ir.is_call(node.args[0], frozenset({torch.stack}))
