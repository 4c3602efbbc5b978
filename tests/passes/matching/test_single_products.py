"""Matmuls that sum one product become multiplications, bit for bit; others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from piecegraph.compiler.tracing.trace import trace
from piecegraph.passes.matching.single_products import MATMUL, multiply_single_products
from piecegraph.passes.matching.torch_ir import is_call

Function = Callable[[torch.Tensor], torch.Tensor]


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def rewritten(function: Function, x: torch.Tensor) -> tuple[int, int, fx.GraphModule]:
    """(rewritten, matmuls left, the graph) of `function` of `[num_tokens]`."""
    module = trace(_Module(function), (x,), {}, {"x": {0: "num_tokens"}}).graph_module
    count = multiply_single_products(module.graph)
    module.graph.lint()
    module.recompile()
    return count, sum(is_call(node, MATMUL) for node in module.graph.nodes), module


FREQUENCIES = 10000.0 ** -(torch.arange(8) / 8)

ONE_PRODUCT: dict[str, Function] = {
    "a rotary table": lambda x: (FREQUENCIES[None, :, None].to(x.dtype) @ x[None, None, :]).transpose(1, 2).cos(),
    "torch.matmul": lambda x: torch.matmul(x[:, None], FREQUENCIES[None, :].to(x.dtype)),
    "torch.bmm": lambda x: torch.bmm(x[None, :, None], x[None, None, :]),
    "the method": lambda x: x[:, None].matmul(x[None, :]),
    "two batches": lambda x: torch.matmul(x[None, :, None], x[None, None, :].expand(3, 1, -1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ONE_PRODUCT)
def test_a_matmul_of_one_product_becomes_a_multiplication(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function = ONE_PRODUCT[name]
    count, left, module = rewritten(function, torch.randn(5).to(dtype))
    assert (count, left) == (1, 0)
    for num_tokens in (1, 2, 9):
        x = torch.randn(num_tokens).to(dtype)
        assert torch.equal(run(module, x), function(x))


def run(module: fx.GraphModule, x: torch.Tensor) -> torch.Tensor:
    """The graph's inputs are `x`, its size, and the constant."""
    values = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            example = node.meta["example_value"]
            is_x = isinstance(example, torch.Tensor) and not isinstance(example.shape[0], int)
            values.append(x if is_x else FREQUENCIES if isinstance(example, torch.Tensor) else len(x))
    result = module(*values)
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


STAYING: dict[str, Function] = {
    "sums": lambda x: x[:, None].expand(-1, 4) @ torch.ones(4, 2),
    "an inner size that only a call tells": lambda x: x[None, :] @ x[:, None],
    "a vector": lambda x: x[:, None] @ torch.ones(1),
}


@pytest.mark.parametrize("name", STAYING)
def test_matmuls_of_more_than_one_product_stay(name: str) -> None:
    count, left, _ = rewritten(STAYING[name], torch.randn(5))
    assert (count, left) == (0, 1)


def test_a_result_of_other_strides_stays() -> None:
    """A product of two transposed operands would have their layout."""

    def outer(x: torch.Tensor) -> torch.Tensor:
        column = x[:, None].expand(-1, 2).contiguous().t()[:, :, None]
        return torch.bmm(column, torch.ones(3, 2).t()[:, None, :])

    assert rewritten(outer, torch.randn(5))[:2] == (0, 1)


def test_a_split_op_stays() -> None:
    module = trace(
        _Module(lambda x: torch.bmm(x[None, :, None], x[None, None, :])),
        (torch.randn(5),),
        {},
        {"x": {0: "num_tokens"}},
    ).graph_module
    (node,) = [each for each in module.graph.nodes if is_call(each, MATMUL)]
    assert multiply_single_products(module.graph, keep=[node]) == 0
    assert multiply_single_products(module.graph) == 1
