"""`fuse-add-rms-norm`: an RMS norm, and the residual add right before it, become one op.

However a model spells it: Llama's float32 in the middle, Gemma's `1 + weight`, no weight, over the hidden size or a
head's. A reciprocal square root is where a norm is found, so none is passed over in silence.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from piecegraph.passes import torch_ir as ir
from piecegraph.passes.effects import changed_between, is_left_alone
from piecegraph.passes.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM, MAX_SIZE, RMS_NORM
from piecegraph.passes.torch_ir import NoMatch


@dataclass(frozen=True)
class FuseAddRMSNorm(GraphPass):
    """`x / rms(x) * (offset + weight)` over the last dim becomes `piecegraph::rms_norm`; where `x` is the sum of two
    tensors of its shape and dtype that nothing reads before the norm is done, `piecegraph::add_rms_norm`. A weight that
    the graph computes is no weight here: its product stays a call of its own, since the kernel reads weights early.

    Rounds once where most models round twice, so results differ in their last bit.
    """

    name: ClassVar[str] = "fuse-add-rms-norm"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for anchor in [node for node in graph.nodes if _is_anchor(node)]:
            try:
                norm = _norm_at(anchor)
            except NoMatch as reason:
                misses.append(Miss(anchor.name, str(reason)))
                continue
            _fuse(graph, norm, context)
            matches += 1
        return PassResult(matches, tuple(misses))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """`result = x / rms(x) * (offset + weight)`, of `x`'s dtype."""

    x: fx.Node
    weight: fx.Node | None
    eps: float
    offset: float
    result: fx.Node
    inner: tuple[fx.Node, ...]  # what computes it, and nothing else if nothing else reads it


def _is_anchor(node: fx.Node) -> bool:
    return ir.is_call(node, ir.RSQRT | ir.RMS_NORM) or _is_inverse_root(node)


def _is_inverse_root(node: fx.Node) -> bool:
    both = ir.operands(node, ir.POW)
    return both is not None and ir.number(both[1]) == -0.5


def _norm_at(anchor: fx.Node) -> _Norm:
    return _norm_of_call(anchor) if ir.is_call(anchor, ir.RMS_NORM) else _norm_around(anchor)


def _norm_of_call(call: fx.Node) -> _Norm:
    """`F.rms_norm(x, normalized_shape, weight, eps)`."""
    x, shape = call.args[0], ir.argument(call, 1, "normalized_shape")
    weight, eps = ir.argument(call, 2, "weight"), ir.argument(call, 3, "eps")
    if not ir.is_tensor(x) or not isinstance(shape, tuple | list) or len(shape) != 1:
        raise NoMatch(f"it norms over the dims {shape}; wanted is the last alone")
    if (constant := ir.number(eps)) is None:
        raise NoMatch(f"its epsilon is no constant but {eps}")
    if weight is not None and not is_left_alone(weight):
        raise NoMatch(f"its weight {weight} is computed here; wanted is an input that nothing changes")
    narrow = ir.strip_widening(x)
    inner = [call, *_casts(x, narrow)]
    result, weight, offset = _factor(call, narrow, inner, weight)
    return _of_one_dtype(result, (narrow, x), weight=weight, eps=constant, offset=offset, inner=inner)


def _norm_around(root: fx.Node) -> _Norm:
    """`x * root(mean(x ** 2) + eps)`, then perhaps a factor, with casts between."""
    total: Any = root.args[0]
    mean, eps = _mean_and_eps(total)
    square: Any = mean.args[0]
    squared = _squared(square)
    if not ir.is_last_dim(ir.argument(mean, 1, "dim"), len(ir.shape_of(squared))):
        raise NoMatch(f"{mean} is a mean over dim {ir.argument(mean, 1, 'dim')}; wanted is the last alone")
    if ir.argument(mean, 2, "keepdim", False) is not True:
        raise NoMatch(f"{mean} does not keep its dim")
    for node in (square, mean, total, root):
        readers = [user.name for user in node.users]
        if len(readers) > 1:
            raise NoMatch(f"{node} has a second reader: {', '.join(readers)}")
    scaled = next(iter(root.users), None)
    wide = ir.other_operand(scaled, ir.MUL, root) if scaled is not None else None
    if scaled is None or not ir.is_tensor(wide):
        raise NoMatch(f"{root} is read by {scaled}; wanted is a product with what was squared")
    x = ir.strip_widening(squared)
    if ir.operands(x, ir.SUB) is not None:
        raise NoMatch(f"what is squared is a difference, {x}: a norm that takes the mean off (LayerNorm)")
    if ir.strip_widening(wide) is not x:
        raise NoMatch(f"{scaled} scales {wide}, but what was squared is {squared}")
    inner = [square, mean, total, root, scaled]
    result, weight, offset = _factor(scaled, x, inner)
    inner += [*_casts(squared, x), *_casts(wide, x)]
    return _of_one_dtype(result, (x, wide, squared), weight=weight, eps=eps, offset=offset, inner=inner)


def _mean_and_eps(total: Any) -> tuple[fx.Node, float]:
    both = ir.operands(total, ir.ADD)
    if both is None:
        raise NoMatch(f"it is the root of {total}; wanted is a mean of squares plus an epsilon")
    mean = next((each for each in both if ir.is_call(each, ir.MEAN)), None)
    if mean is None:
        raise NoMatch(f"it is the root of a sum of {both[0]} and {both[1]}; wanted is a mean of squares and an epsilon")
    eps = both[1] if both[0] is mean else both[0]
    constant = ir.number(eps)
    if constant is None:
        raise NoMatch(f"its epsilon is no constant but {eps}")
    return mean, constant


def _squared(square: Any) -> fx.Node:
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


def _factor(
    scaled: fx.Node, x: fx.Node, inner: list[fx.Node], weight: fx.Node | None = None
) -> tuple[fx.Node, fx.Node | None, float]:
    """(result, weight, offset): follow what `x / rms(x)` becomes, as long as it is a weight's product or a narrowing.

    Adds what it passes to `inner`.
    """
    result, offset = scaled, 0.0
    while len(result.users) == 1:
        reader = next(iter(result.users))
        if ir.cast_source(reader) is result and ir.is_widening(ir.dtype_of(reader), ir.dtype_of(result)):
            # Narrower than x is another tensor's dtype, not this norm's.
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
    """(weight, offset, the nodes that compute offset + weight) if `product` multiplies by them."""
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
    return (weight, offset, _between(factor, weight)) if is_left_alone(weight) else None


def _is_weight(factor: fx.Node, normed: fx.Node) -> bool:
    """`[size]` for a norm over `size`."""
    shape = ir.shape_of(factor)
    return len(shape) == 1 and ir.same_size(shape[0], ir.shape_of(normed)[-1]) and ir.dtype_of(factor).is_floating_point


def _between(last: fx.Node, first: fx.Node) -> list[fx.Node]:
    """From `last` back to `first`, without it, along what each is made of."""
    nodes = []
    while last is not first:
        nodes.append(last)
        last = next(each for each in last.args if ir.is_tensor(each))
    return nodes


def _casts(wide: fx.Node, narrow: fx.Node) -> Iterator[fx.Node]:
    """The casts that make `wide` of `narrow`."""
    while wide is not narrow:
        yield wide
        source = ir.cast_source(wide)
        assert source is not None, wide
        wide = source


def _of_one_dtype(
    result: fx.Node,
    sources: tuple[fx.Node, ...],
    *,
    weight: fx.Node | None,
    eps: float,
    offset: float,
    inner: list[fx.Node],
) -> _Norm:
    """The op gives the dtype it takes: it reads that of `sources`, all of the same values, which has the result's."""
    dtype = ir.dtype_of(result)
    x = next((each for each in sources if ir.dtype_of(each) == dtype), None)
    if x is None:
        raise NoMatch(f"{result} is {dtype}, which none of {', '.join(f'{x} ({ir.dtype_of(x)})' for x in sources)} is")
    if not dtype.is_floating_point or dtype.itemsize > 4:
        raise NoMatch(f"it is computed in {dtype}; wanted is float32 or shorter")
    size = ir.last_dim(x)
    if size is None or size > MAX_SIZE:
        raise NoMatch(f"rows of {x} have {ir.shape_of(x)[-1]} numbers; the kernel takes up to {MAX_SIZE}")
    first = next(node for node in result.graph.nodes if node in inner)
    if (changed := changed_between(first, result, sources)) is not None:
        raise NoMatch(f"{changed[0]} is changed in place by {changed[1]}, before {result} is there")
    return _Norm(x=x, weight=weight, eps=eps, offset=offset, result=result, inner=tuple(inner))


def _fuse(graph: fx.Graph, norm: _Norm, context: PassContext) -> None:
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


def _summands(norm: _Norm, context: PassContext) -> tuple[fx.Node, fx.Node] | None:
    """What `norm.x` is the sum of, if the norm can compute that too: in time for all who read the sum."""
    both = ir.operands(norm.x, ir.ADD)
    if both is None or not ir.is_tensor(both[0]) or not ir.is_tensor(both[1]):
        return None
    if not all(ir.dtype_of(each) == ir.dtype_of(norm.x) and ir.same_shape(each, norm.x) for each in both):
        return None
    own = {*norm.inner, norm.result}
    node = norm.x.next
    while node is not norm.result:
        if context.is_split_op(node):  # the norm's result would have to cross the cut
            return None
        if node in own:
            if not own.issuperset(node.users):  # the sum's cast, say: it stays, and so does the sum
                return None
        elif norm.x in node.all_input_nodes:
            return None
        node = node.next
    return both if changed_between(norm.x, norm.result, both) is None else None


def _swap_of_rows(x: fx.Node) -> tuple[fx.Node, int, int] | None:
    """(source, dim, dim) if `x` swaps dims that are not normed over. Rows normed in their first order stay where
    views find them: heads beside their token."""
    swap = ir.swapped_dims(x)
    return swap if swap is not None and len(ir.shape_of(x)) - 1 not in swap[1:] else None
