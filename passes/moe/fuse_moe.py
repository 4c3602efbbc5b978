"""`fuse-moe`: replace a sort and two grouped matmuls, the routed experts of a mixture, by one op.

The pass matches transformers' `grouped_mm` form of experts, which sorts pairs of token and expert, multiplies groups of
rows, and restores the order of the products. Routing (softmax, topk, normalisation) stays in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import changed_between
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.collectives import GATHER_TOKENS
from piecegraph.passes.ops.moe.experts import MOE_EXPERTS

GROUPED_MM = frozenset({"_grouped_mm", "grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback.default"})
"""The names of grouped matmuls: torch's private and public function, and transformers' op for dtypes torch lacks."""

MASKED_FILL = frozenset({"masked_fill", "masked_fill_"})
FLATTEN = frozenset({"reshape", "view", "flatten", torch.reshape, torch.flatten})
VIEW = frozenset({"view", "reshape", torch.reshape})
TOPK = frozenset({"topk", torch.topk})
UNSQUEEZE = frozenset({"unsqueeze", torch.unsqueeze})
SUM = frozenset({"sum", torch.sum})


@dataclass(frozen=True, slots=True)
class FuseMoe(GraphPass):
    """A pass that replaces routed experts by `piecegraph::moe_experts`.

    The experts are gated by an activation in `act_mul.ACTIVATIONS`, have no biases, and are chosen by `topk` over all
    of them; where other ranks have the others, their ids have been replaced by the number of experts here. The op
    rounds less often than the calls it replaces. Every grouped matmul is part of a match or of a miss.
    """

    name: ClassVar[str] = "fuse-moe"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches, misses = 0, []
        for products in _sites(graph):
            try:
                experts = _match(products)
            except NoMatch as why:
                misses.append(Miss(products[-1].name, str(why)))
                continue
            _replace(graph, experts)
            matches += 1
        return PassResult(matches=matches, misses=tuple(misses))


@dataclass(frozen=True, slots=True)
class _Routing:
    """The token's choice of experts, and the sort of the pairs of token and expert."""

    topk_ids: fx.Node  # [num_tokens, top_k]
    sort: fx.Node  # of all pairs, by expert
    num_experts: int  # whose weights are here
    num_all_experts: int | None  # among which tokens choose; None: those here

    @property
    def top_k(self) -> int | None:
        return ir.last_dim(self.topk_ids)

    def is_permutation(self, node: Any) -> bool:
        """Return whether `node` is the index of each pair in the sorted order."""
        return ir.is_call(node, ir.GETITEM) and node.args == (self.sort, 1)

    def is_sorted_ids(self, node: Any) -> bool:
        return ir.is_call(node, ir.GETITEM) and node.args == (self.sort, 0)


@dataclass(frozen=True, slots=True)
class _Experts:
    """The operands of `moe_experts`, and the nodes that it replaces."""

    x: fx.Node
    topk_weights: fx.Node
    topk_ids: fx.Node
    gate_up: fx.Node  # as the grouped matmul has it, [num_experts, hidden, 2 * size]
    down: fx.Node  # [num_experts, size, hidden]
    activation: str
    num_all_experts: int | None
    result: fx.Node
    region: tuple[fx.Node, ...]  # nodes between the operands and the result, the result included


def _sites(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    """Return the grouped matmuls, those over the same groups together."""
    sites: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _name(node) in GROUPED_MM:
            sites.setdefault(ir.argument(node, 2, "offs"), []).append(node)
    return [tuple(products) for products in sites.values()]


def _match(products: tuple[fx.Node, ...]) -> _Experts:
    """Return the experts of two grouped matmuls. Raises `NoMatch`."""
    if len(products) != 2:
        raise NoMatch(f"grouped matmuls over the same groups: {len(products)}, not 2, gate/up and down")
    first, second = products
    for product in products:
        if ir.argument(product, 3, "bias") is not None or ir.argument(product, 4, "out_dtype") is not None:
            raise NoMatch(f"{product.name} has a bias or a dtype of its own")
    routing = _routing(ir.argument(first, 2, "offs"))
    x = _gathered_input(first, routing)
    result, topk_weights = _weighted_sum(second, routing, ir.dtype_of(x))
    activation, gate_up = _gated(_unmasked(second.args[0], routing))
    if _unmasked(gate_up, routing) is not first:
        raise NoMatch(f"{gate_up.name}, which the activation reads, is not {first.name} {_biased(first)}".rstrip())
    gate_up_weights, down_weights = first.args[1], second.args[1]
    assert isinstance(gate_up_weights, fx.Node) and isinstance(down_weights, fx.Node), products
    dtypes = {ir.dtype_of(node) for node in (x, gate_up_weights, down_weights)}
    if len(dtypes) > 1 or not ir.dtype_of(x).is_floating_point or ir.dtype_of(x).itemsize > 4:
        found = ", ".join(sorted(map(str, dtypes)))
        raise NoMatch(f"tokens and weights are {found}; wanted is one dtype, float32 or shorter")
    operands = {x, topk_weights, routing.topk_ids, gate_up_weights, down_weights}
    region = _closed_region(result, operands)
    start = next(node for node in result.graph.nodes if node in region)
    if (changed := changed_between(start, result, operands)) is not None:
        raise NoMatch(f"{changed[0]} is changed in place by {changed[1]}, before {result.name} is there")
    return _Experts(
        x,
        topk_weights,
        routing.topk_ids,
        gate_up_weights,
        down_weights,
        activation,
        routing.num_all_experts,
        result,
        region,
    )


def _routing(offsets: Any) -> _Routing:
    """Return the routing whose groups end at `offsets`, `cumsum(histc(ids, ...))`. Raises `NoMatch`."""
    counts = _first(offsets) if ir.is_call(offsets, frozenset({torch.cumsum, "cumsum"})) else None
    if not ir.is_call(counts, frozenset({torch.histc, "histc"})):
        raise NoMatch("groups do not end where a sum over a count of sorted expert ids says")
    num_experts = ir.argument(counts, 1, "bins")
    bounds = (ir.argument(counts, 2, "min"), ir.argument(counts, 3, "max"))
    sort, index = _indexed(ir.cast_source(_first(counts)) or _first(counts))
    is_sort = ir.is_call(sort, frozenset({torch.sort})) and len(sort.args) == 1 and not sort.kwargs
    if not is_sort or index != 0 or not isinstance(num_experts, int) or bounds != (0, num_experts - 1):
        raise NoMatch(f"{counts.name} does not count expert ids sorted upwards")
    topk_ids = _flattened(sort.args[0])
    chosen_from = _num_chosen_from(topk_ids)
    is_part = ir.is_call(topk_ids, MASKED_FILL) and ir.argument(topk_ids, 2, "value") == num_experts
    if is_part:
        chosen_from = _num_chosen_from(_own_ids(topk_ids))
    routing = _Routing(topk_ids, sort, num_experts, chosen_from if is_part else None)
    if routing.top_k is None or not (is_part or chosen_from == num_experts):
        raise NoMatch(
            f"{topk_ids.name} is not a choice of topk among the {num_experts} experts whose weights are here: "
            "an id might name none of them (experts of several devices)"
        )
    return routing


def _flattened(node: Any) -> fx.Node:
    """Return the `[num_tokens, top_k]` tensor that `node` views as `[num_tokens * top_k]`. Raises `NoMatch`."""
    if (
        ir.is_call(node, FLATTEN)
        and ir.is_tensor(node.args[0])
        and len(ir.shape_of(node.args[0])) == 2 == len(ir.shape_of(node)) + 1
    ):
        return node.args[0]
    raise NoMatch(f"{node} is not a flat view of something for each token and expert")


def _num_chosen_from(topk_ids: Any) -> int | None:
    """Return among how many experts `topk` chose the ids; None: they are no choice of `topk`."""
    topk, index = _indexed(ir.cast_source(topk_ids) or topk_ids)
    return ir.last_dim(_first(topk)) if index == 1 and ir.is_call(topk, TOPK) else None


def _own_ids(masked: fx.Node) -> Any:
    """Return the `ids` of `(ids - first_expert).masked_fill(...)`, before they were gathered from several engines.

    What is found only decides how the experts are computed.
    """
    node = _first(masked)
    if (difference := ir.operands(node, ir.SUB)) is not None:
        node = difference[0]
    return _first(node) if ir.is_call(node, frozenset({GATHER_TOKENS})) else node


def _indexed(node: Any) -> tuple[Any, Any]:
    """Return `(source, index)` of `source[index]`, or (None, None)."""
    return (node.args[0], node.args[1]) if ir.is_call(node, ir.GETITEM) else (None, None)


def _first(node: fx.Node) -> Any:
    return node.args[0]


def _name(node: Any) -> Any:
    """Return the name of the operator, function or method that a node calls."""
    return getattr(node.target, "__name__", node.target) if isinstance(node, fx.Node) else None


def _unmasked(node: Any, routing: _Routing) -> fx.Node:
    """Return `node` without casts to its own dtype and without the masking of rows of no expert, which count for
    nothing in the op."""
    while True:
        source = ir.cast_source(node)
        if source is not None and ir.dtype_of(source) == ir.dtype_of(node):
            node = source
        elif ir.is_call(node, MASKED_FILL) and _is_no_expert(node.args[1], routing):
            node = node.args[0]
        else:
            assert isinstance(node, fx.Node), node
            return node


def _is_no_expert(mask: Any, routing: _Routing) -> bool:
    """Return whether `mask` is `(sorted_ids >= num_experts).unsqueeze(-1)`: of experts that other ranks have, if
    any."""
    compared: Any = _first(mask) if ir.is_call(mask, UNSQUEEZE) else None
    if _name(compared) != "ge":
        return False
    return routing.is_sorted_ids(compared.args[0]) and bool(compared.args[1] == routing.num_experts)


def _gathered_input(product: fx.Node, routing: _Routing) -> fx.Node:
    """Return `x` of `x[permutation // top_k]`. Raises `NoMatch`."""
    x, index = _indexed(_unmasked(product.args[0], routing))
    is_token = (
        _name(index) in ("floordiv", "floor_divide")
        and routing.is_permutation(index.args[0])
        and index.args[1] == routing.top_k
    )
    if not is_token or not ir.is_tensor(x) or len(ir.shape_of(x)) != 2:
        raise NoMatch(f"{product.name} does not read the tokens of its pairs, a row each")
    if not ir.same_size(ir.shape_of(x)[0], ir.shape_of(routing.topk_ids)[0]):
        raise NoMatch(f"{x.name} has another number of rows than {routing.topk_ids.name}")
    return x


def _gated(node: fx.Node) -> tuple[str, fx.Node]:
    """Return the activation's name and its input: `act(gate) * up` of the halves of one tensor, or `act_mul`. Raises
    `NoMatch`."""
    if ir.is_call(node, frozenset({ACT_MUL})):
        gate_up: Any
        activation: Any
        gate_up, activation = node.args
        return activation, gate_up
    for act, up in _both_ways(ir.operands(node, ir.MUL)):
        activation = _activation(act)
        gate, other = (ir.columns_of(act.args[0]) if activation else None), ir.columns_of(up)
        if activation is None or gate is None or other is None:
            continue
        size = ir.last_dim(gate.source)
        halves = (gate.start, gate.stop, other.start, other.stop)
        if gate.source is other.source and size is not None and halves == (0, size // 2, size // 2, size):
            return activation, gate.source
        raise NoMatch(f"gate and up are columns {halves} of {gate.source.name}, not its first and its second half")
    raise NoMatch(f"experts are gated by something other than act(gate) * up, at {node.name}")


def _both_ways(pair: tuple[Any, Any] | None) -> tuple[tuple[Any, Any], ...]:
    return () if pair is None else (pair, (pair[1], pair[0]))


def _activation(node: Any) -> str | None:
    """Return the activation's name in `act_mul.ACTIVATIONS`, or None."""
    if ir.is_call(node, ir.SILU):
        return "silu"
    if ir.is_call(node, ir.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(ir.argument(node, 1, "approximate", "none"))
    return None


def _weighted_sum(product: fx.Node, routing: _Routing, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
    """Return the sum over each token's experts, and the weights `[num_tokens, top_k]`, starting at the second product.

    Raises `NoMatch`.
    """
    node = product
    topk_weights: fx.Node | None = None
    is_in_order = is_split = False
    while True:
        reader = _only_reader(node, routing)
        if ir.is_call(reader, MASKED_FILL) and _is_no_expert(reader.args[1], routing):
            pass
        elif topk_weights is None and (weights := _weights(reader, node, routing)) is not None:
            topk_weights = weights
        elif not is_in_order and ir.is_call(reader, ir.GETITEM) and _is_inverse(reader.args[1], routing):
            is_in_order = True
        elif is_in_order and not is_split and ir.is_call(reader, VIEW) and _is_by_token(reader, routing):
            is_split = True
        elif topk_weights is not None and is_split and ir.is_call(reader, SUM):
            if ir.argument(reader, 1, "dim") != 1 or ir.argument(reader, 2, "keepdim", False):
                raise NoMatch(f"{reader.name} is not a sum over a token's experts")
            return _in_dtype(reader, dtype), topk_weights
        else:
            raise NoMatch(f"{reader.name} does not belong to a weighted sum over a token's experts {_biased(product)}")
        node = reader


def _only_reader(node: fx.Node, routing: _Routing) -> fx.Node:
    """Return the only reader of `node`. Raises `NoMatch` if there are several.

    In-place fills of rows of no expert do not count: nothing reads their result.
    """
    readers = [
        user
        for user in node.users
        if not (user.target == "masked_fill_" and not user.users and _is_no_expert(user.args[1], routing))
    ]
    if len(readers) != 1:
        found = ", ".join(reader.name for reader in readers) or "nobody"
        raise NoMatch(f"{node.name} is read by {found} {_biased(node)}".rstrip())
    return readers[0]


def _biased(product: fx.Node) -> str:
    """Return the likeliest reason for a miss, or an empty string."""
    return "(experts have biases)" if any(user.target == "add_" for user in product.users) else ""


def _weights(reader: fx.Node, node: fx.Node, routing: _Routing) -> fx.Node | None:
    """Return `topk_weights` of `node * topk_weights.reshape(-1)[permutation].unsqueeze(-1)`, or None."""
    for factor, weight in _both_ways(ir.operands(reader, ir.MUL)):
        if factor is not node or not ir.is_call(weight, UNSQUEEZE):
            continue
        flat, index = _indexed(_first(weight))
        if routing.is_permutation(index) and ir.argument(weight, 1, "dim") in (-1, 1):
            topk_weights = _flattened(flat)
            return topk_weights if ir.last_dim(topk_weights) == routing.top_k else None
    return None


def _is_inverse(index: Any, routing: _Routing) -> bool:
    """Return whether `index` is filled by `inverse[permutation] = arange(n)`, in a new tensor like `permutation`."""
    if not ir.is_call(index, frozenset({torch.empty_like})) or not routing.is_permutation(index.args[0]):
        return False
    writers = [user for user in index.users if _name(user) == "setitem"]
    if len(writers) != 1 or not routing.is_permutation(writers[0].args[1]):
        return False
    numbers = writers[0].args[2]
    return ir.is_call(numbers, frozenset({torch.arange})) and len(numbers.args) == 1


def _is_by_token(view: fx.Node, routing: _Routing) -> bool:
    num_tokens, top_k = ir.shape_of(routing.topk_ids)
    shape = ir.shape_of(view)
    return len(shape) == 3 and ir.same_size(shape[0], num_tokens) and ir.same_size(shape[1], top_k)


def _in_dtype(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the sum in the tokens' dtype: the node itself or its cast. Raises `NoMatch`."""
    readers = list(node.users)
    if len(readers) == 1 and ir.cast_source(readers[0]) is node and ir.dtype_of(readers[0]) == dtype:
        return readers[0]
    if ir.dtype_of(node) == dtype:
        return node
    raise NoMatch(f"{node.name} is {ir.dtype_of(node)}, and read as that, where tokens are {dtype}")


def _closed_region(result: fx.Node, operands: set[fx.Node]) -> tuple[fx.Node, ...]:
    """Return all nodes between `operands` and `result`. Raises `NoMatch` if anything but the result is read from
    outside."""
    region: dict[fx.Node, None] = {}
    left = [result]
    while left:
        node = left.pop()
        if node in region or node in operands or node.op == "placeholder":
            continue
        region[node] = None
        left += [source for source in node.all_input_nodes if not _is_shared(source)]
        left += list(_writers_in_place(node))
    for node in region:
        outside = [user for user in node.users if user not in region]
        if node is not result and outside:
            raise NoMatch(f"{node.name} is also read by {outside[0].name}")
    return tuple(region)


def _is_shared(node: fx.Node) -> bool:
    """Return whether a node may serve any part of the graph: a size, or a tensor made of nothing but sizes."""
    if isinstance(ir.value_of(node), int | torch.SymInt):
        return True
    return (
        node.op != "placeholder"
        and not node.users.keys() & set(_writers_in_place(node))
        and all(isinstance(ir.value_of(source), int | torch.SymInt) for source in node.all_input_nodes)
    )


def _writers_in_place(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        name = str(_name(user))
        if user.args[:1] == (node,) and not user.users and (name == "setitem" or name.endswith("_")):
            yield user


def _replace(graph: fx.Graph, experts: _Experts) -> None:
    with graph.inserting_before(experts.result):
        fused = graph.call_function(
            MOE_EXPERTS,
            (
                experts.x,
                experts.topk_weights,
                experts.topk_ids,
                _transposed(graph, experts.gate_up),
                _transposed(graph, experts.down),
                experts.activation,
                *(() if experts.num_all_experts is None else (experts.num_all_experts,)),
            ),
        )
    fused.meta["example_value"] = experts.result.meta["example_value"]
    experts.result.replace_all_uses_with(fused)
    made_for_it = [source for node in experts.region for source in node.all_input_nodes if _is_shared(source)]
    sizes = [source for node in made_for_it for source in node.all_input_nodes]
    weights = (experts.gate_up, experts.down)
    left = (*experts.region, *made_for_it, *sizes, *weights)
    ir.erase_unread(graph, [node for node in left if node.op != "placeholder"])


def _transposed(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    """Return the weight as a view `[num_experts, out, in]`; if it is a transpose, return its source."""
    swapped = ir.swapped_dims(weight)
    if swapped is not None and {*swapped[1:]} == {1, 2}:
        return swapped[0]
    return graph.call_method("transpose", (weight, -2, -1))
