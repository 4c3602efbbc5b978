"""`fuse-add-rms-norm`: fuse an RMS norm, and the residual add right before it, into one op.

All common forms match: computed in float32 between casts (Llama), scaled by `1 + weight` (Gemma), without a weight,
over the hidden size or over each head. Every reciprocal square root and every `F.rms_norm` is a site, so each norm that
does not match is reported as a miss.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from piecegraph.passes.kernels.common.gpu_limits import MAX_NORM_SIZE
from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import changed_between, is_unmodified_input
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM, RMS_NORM


@dataclass(frozen=True)
class FuseAddRMSNorm(GraphPass):
    """A pass that replaces `x / rms(x) * (offset + weight)` over the last dim by `piecegraph::rms_norm`.

    `rms(x)` is `sqrt(mean(x ** 2) + eps)`. If `x` is the sum of two tensors of its own shape and dtype, and nothing but
    the norm reads the sum before the norm is done, the addition becomes part of the op: `piecegraph::add_rms_norm`,
    which returns the norm and the sum. If the graph computes the weight, the multiplication stays a call of its own,
    because the kernel reads its weight before the preceding kernel has ended.

    The fused op rounds once where most models round twice, so results may differ in the last bit.
    """

    name: ClassVar[str] = "fuse-add-rms-norm"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for anchor in [node for node in graph.nodes if is_anchor(node)]:
            try:
                norm = norm_at(anchor)
            except NoMatch as reason:
                misses.append(Miss(anchor.name, str(reason)))
                continue
            _fuse(graph, norm, context)
            matches += 1
        return PassResult(matches, tuple(misses))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedNorm:
    """A matched norm: `result = x / rms(x) * (offset + weight)`, with the dtype of `x`."""

    x: fx.Node
    weight: fx.Node | None  # [size]; None: no factor
    eps: float
    offset: float
    result: fx.Node
    inner: tuple[fx.Node, ...]  # the nodes that compute `result`; erased unless something else reads them


def is_anchor(node: fx.Node) -> bool:
    """Return whether a node is a reciprocal square root or a call of `F.rms_norm`; each norm has one."""
    return ir.is_call(node, ir.RSQRT | ir.RMS_NORM) or _is_inverse_root(node)


def _is_inverse_root(node: fx.Node) -> bool:
    """Return whether a node is a power of -0.5."""
    both = ir.operands(node, ir.POW)
    return both is not None and ir.number(both[1]) == -0.5


def norm_at(anchor: fx.Node) -> MatchedNorm:
    """Return the norm that contains an anchor. Raises `NoMatch`."""
    return _norm_of_call(anchor) if ir.is_call(anchor, ir.RMS_NORM) else _norm_around(anchor)


def _norm_of_call(call: fx.Node) -> MatchedNorm:
    """Match `F.rms_norm(x, normalized_shape, weight, eps)`. Raises `NoMatch`."""
    x, shape = call.args[0], ir.argument(call, 1, "normalized_shape")
    weight, eps = ir.argument(call, 2, "weight"), ir.argument(call, 3, "eps")
    if not ir.is_tensor(x) or not isinstance(shape, tuple | list) or len(shape) != 1:
        raise NoMatch(f"it norms over the dims {shape}; wanted is the last alone")
    if (constant := ir.number(eps)) is None:
        raise NoMatch(f"its epsilon is not a constant but {eps}")
    if weight is not None and not is_unmodified_input(weight):
        raise NoMatch(f"its weight {weight} is computed here; wanted is an input that nothing changes")
    narrow = ir.strip_widening(x)
    inner = [call, *_casts(x, narrow)]
    result, weight, offset = _follow_factor(call, narrow, inner, weight)
    return _make_norm(result, (narrow, x), weight=weight, eps=constant, offset=offset, inner=inner)


def _norm_around(rsqrt: fx.Node) -> MatchedNorm:
    """Match `x * rsqrt(mean(x ** 2) + eps)`, an optional factor, and casts between them. Raises `NoMatch`."""
    total: Any = rsqrt.args[0]
    mean, eps = _mean_and_eps(total)
    square: Any = mean.args[0]
    squared = _squared(square)
    if not ir.is_last_dim(ir.argument(mean, 1, "dim"), len(ir.shape_of(squared))):
        raise NoMatch(f"{mean} is a mean over dim {ir.argument(mean, 1, 'dim')}; wanted is the last alone")
    if ir.argument(mean, 2, "keepdim", False) is not True:
        raise NoMatch(f"{mean} does not keep its dim")
    for node in (square, mean, total, rsqrt):
        readers = [user.name for user in node.users]
        if len(readers) > 1:
            raise NoMatch(f"{node} has a second reader: {', '.join(readers)}")
    scaled = next(iter(rsqrt.users), None)
    wide = ir.other_operand(scaled, ir.MUL, rsqrt) if scaled is not None else None
    if scaled is None or not ir.is_tensor(wide):
        raise NoMatch(f"{rsqrt} is read by {scaled}; wanted is a product with what was squared")
    x = ir.strip_widening(squared)
    if ir.operands(x, ir.SUB) is not None:
        raise NoMatch(f"what is squared is a difference, {x}: a norm that takes the mean off (LayerNorm)")
    if ir.strip_widening(wide) is not x:
        raise NoMatch(f"{scaled} scales {wide}, but what was squared is {squared}")
    inner = [square, mean, total, rsqrt, scaled]
    result, weight, offset = _follow_factor(scaled, x, inner)
    inner += [*_casts(squared, x), *_casts(wide, x)]
    return _make_norm(result, (x, wide, squared), weight=weight, eps=eps, offset=offset, inner=inner)


def _mean_and_eps(total: Any) -> tuple[fx.Node, float]:
    """Return the mean and the constant of `total`, which must be their sum. Raises `NoMatch`."""
    both = ir.operands(total, ir.ADD)
    if both is None:
        raise NoMatch(f"it is the root of {total}; wanted is a mean of squares plus an epsilon")
    mean = next((each for each in both if ir.is_call(each, ir.MEAN)), None)
    if mean is None:
        raise NoMatch(f"it is the root of a sum of {both[0]} and {both[1]}; wanted is a mean of squares and an epsilon")
    eps = both[1] if both[0] is mean else both[0]
    constant = ir.number(eps)
    if constant is None:
        raise NoMatch(f"its epsilon is not a constant but {eps}")
    return mean, constant


def _squared(square: Any) -> fx.Node:
    """Return the tensor that `square` is the square of. Raises `NoMatch`."""
    power, product = ir.operands(square, ir.POW), ir.operands(square, ir.MUL)
    x = None
    if power is not None and ir.number(power[1]) == 2:
        x = power[0]
    elif product is not None and product[0] is product[1]:
        x = product[0]
    elif ir.is_call(square, ir.SQUARE):
        x = square.args[0]
    if not ir.is_tensor(x):
        raise NoMatch(f"it averages {square}; wanted are squares")
    return x


def _follow_factor(
    scaled: fx.Node, x: fx.Node, inner: list[fx.Node], weight: fx.Node | None = None
) -> tuple[fx.Node, fx.Node | None, float]:
    """Follow `scaled`, which is `x / rms(x)`, through narrowing casts and a product with a weight, in any order.

    `weight`: a weight that `scaled` has been multiplied by already. Returns the last node (the result of the norm), the
    weight and its offset, and appends the nodes after `scaled` to `inner`.
    """
    result, offset = scaled, 0.0
    while len(result.users) == 1:
        reader = next(iter(result.users))
        if ir.cast_source(reader) is result and ir.is_widening(ir.dtype_of(reader), ir.dtype_of(result)):
            # A cast to a narrower dtype than that of `x` is not part of the norm.
            if not ir.is_widening(ir.dtype_of(x), ir.dtype_of(reader)):
                break
        elif weight is None and (found := _weight_in(reader, result)) is not None:
            weight, offset, between = found
            inner += between
        else:
            break
        inner.append(reader)
        result = reader
    return result, weight, offset


def _weight_in(product: fx.Node, normed: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """Return a weight, its offset and the nodes that compute their sum if `product` is `normed` times it, else None."""
    factor = ir.other_operand(product, ir.MUL, normed)
    if not ir.is_tensor(factor) or not _is_weight(factor, normed):
        return None
    weight, offset = factor, 0.0
    summands = ir.operands(ir.strip_widening(factor), ir.ADD)
    if summands is not None:
        constants = [each for each in map(ir.number, summands) if each is not None]
        tensors = [each for each in summands if ir.is_tensor(each)]
        if len(constants) == len(tensors) == 1:
            weight, offset = tensors[0], constants[0]
    weight = ir.strip_widening(weight)
    return (weight, offset, _between(factor, weight)) if is_unmodified_input(weight) else None


def _is_weight(factor: fx.Node, normed: fx.Node) -> bool:
    """Return whether `factor` has the shape `[size]` of a weight for a norm over `size`."""
    shape = ir.shape_of(factor)
    return len(shape) == 1 and ir.same_size(shape[0], ir.shape_of(normed)[-1]) and ir.dtype_of(factor).is_floating_point


def _between(last: fx.Node, first: fx.Node) -> list[fx.Node]:
    """Return the chain of nodes from `last` back to `first`, through the first tensor argument, without `first`."""
    nodes = []
    while last is not first:
        nodes.append(last)
        last = next(each for each in last.args if ir.is_tensor(each))
    return nodes


def _casts(wide: fx.Node, narrow: fx.Node) -> Iterator[fx.Node]:
    """Yield the casts that turn `narrow` into `wide`, the last first."""
    while wide is not narrow:
        yield wide
        source = ir.cast_source(wide)
        assert source is not None, wide
        wide = source


def _make_norm(
    result: fx.Node,
    sources: tuple[fx.Node, ...],
    *,
    weight: fx.Node | None,
    eps: float,
    offset: float,
    inner: list[fx.Node],
) -> MatchedNorm:
    """Return the norm that reads a tensor of the dtype of `result`, because the op returns the dtype that it takes.

    `sources`: tensors with the same values in several dtypes, to choose from. Raises `NoMatch` if none has that dtype,
    if the kernel does not support it, or if a source is changed in place before `result` is computed.
    """
    dtype = ir.dtype_of(result)
    x = next((each for each in sources if ir.dtype_of(each) == dtype), None)
    if x is None:
        raise NoMatch(f"{result} is {dtype}, which none of {', '.join(f'{x} ({ir.dtype_of(x)})' for x in sources)} is")
    if not dtype.is_floating_point or dtype.itemsize > 4:
        raise NoMatch(f"it is computed in {dtype}; wanted is float32 or shorter")
    size = ir.last_dim(x)
    if size is None or size > MAX_NORM_SIZE:
        raise NoMatch(f"rows of {x} have {ir.shape_of(x)[-1]} numbers; the kernel takes up to {MAX_NORM_SIZE}")
    first = next(node for node in result.graph.nodes if node in inner)
    if (changed := changed_between(first, result, sources)) is not None:
        raise NoMatch(f"{changed[0]} is changed in place by {changed[1]}, before {result} is there")
    return MatchedNorm(x=x, weight=weight, eps=eps, offset=offset, result=result, inner=tuple(inner))


def _fuse(graph: fx.Graph, norm: MatchedNorm, context: PassContext) -> None:
    """Replace a matched norm by one op, which also does the addition before it, if `_summands` allows that."""
    x, result = norm.x, norm.result
    options = (norm.weight, norm.eps, norm.offset)
    if (summands := _summands(norm, context)) is not None:
        both = ir.insert_call(graph, result, ADD_RMS_NORM, *summands, *options)
        fused = ir.insert_call(graph, result, operator.getitem, both, 0)
        x.replace_all_uses_with(ir.insert_call(graph, result, operator.getitem, both, 1))
    elif (swap := _swap_of_rows(x)) is not None:
        rows = ir.insert_call(graph, result, RMS_NORM, swap[0], *options)
        fused = ir.insert_call(graph, result, "transpose", rows, *swap[1:])
    else:
        fused = ir.insert_call(graph, result, RMS_NORM, x, *options)
    result.replace_all_uses_with(fused)
    ir.erase_unread(graph, (*norm.inner, x))


def _summands(norm: MatchedNorm, context: PassContext) -> tuple[fx.Node, fx.Node] | None:
    """Return the two summands of `norm.x`, or None if the addition cannot be part of the norm.

    That is the case if it is no sum of two tensors of its shape and dtype, if the sum is read before `norm.result` by
    anything but the norm, if there is a cut between them, or if a summand is changed in place before `norm.result`.
    """
    both = ir.operands(norm.x, ir.ADD)
    if both is None or not ir.is_tensor(both[0]) or not ir.is_tensor(both[1]):
        return None
    if not all(ir.dtype_of(each) == ir.dtype_of(norm.x) and ir.same_shape(each, norm.x) for each in both):
        return None
    own = {*norm.inner, norm.result}
    node = norm.x.next
    while node is not norm.result:
        if context.is_split_op(node):  # one op cannot be on both sides of the cut
            return None
        if node in own:
            if not own.issuperset(node.users):  # another node reads, for example, a cast of the sum, so that stays
                return None
        elif norm.x in node.all_input_nodes:
            return None
        node = node.next
    return both if changed_between(norm.x, norm.result, both) is None else None


def _swap_of_rows(x: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return (source, dim, dim) if `x` is `source` with two dims swapped, neither of them the last; else None.

    The norm then runs on `source`, in which the heads of a token are adjacent, and its result is swapped instead. So
    views of the result need no copy.
    """
    swap = ir.swapped_dims(x)
    return swap if swap is not None and len(ir.shape_of(x)) - 1 not in swap[1:] else None
