"""The outputs of a piece have the strides that the next piece was compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import piecegraph as pg
from piecegraph.compiler.common.fake_values import fresh_fake_mode, propagate_fakes
from piecegraph.compiler.common.symbolic_sizes import make_symbols
from piecegraph.compiler.splitting.exact_strides import dims_by_stride, has_unbacked_strides, with_exact_strides
from tests.compiler import toy  # noqa: F401  (its split ops)


class Transposed(nn.Module):
    """Tables that lie transposed in memory cross a cut: as one value, as a part of one, and as a result."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(1.0, 5.0))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = (self.frequencies[:, None] * positions[None, :]).t().cos()  # strides (1, num_tokens)
        part = (self.frequencies[:, None] * positions[None, :]).t().sin()[:, 1:3]
        other = torch.ops.pgtoy.triple.default(positions)
        return other[:, None] * table + part.repeat(1, 2), table


class OneHead(nn.Module):
    """One KV head: `[1, 1, num_tokens, 8]` is contiguous, and channels-last too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 16, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        num_tokens = hidden.shape[0]
        key = self.project(hidden[None])[..., :8].view(1, num_tokens, 1, 8).transpose(1, 2)
        rotated = key * hidden[None, None, :, :8] + torch.cat((-key[..., 4:], key[..., :4]), dim=-1)
        tripled: torch.Tensor = torch.ops.pgtoy.triple.default(rotated.transpose(1, 2).squeeze(0))
        return tripled


class WrittenInPlace(nn.Module):
    """A key is filled part by part, as DeepSeek-V3's is; a view of it from before the writes crosses the cut too."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = hidden.shape[0]
        key = hidden.new_empty(1, 2, num_tokens, 8)
        last = key[..., 6:].transpose(1, 2)
        halves = key.chunk(2, dim=-1)
        halves[0].copy_(hidden[None, None, :, :4])
        doubled = key[..., 4:].copy_(hidden[None, None, :, 4:8] * 2)
        tripled: torch.Tensor = torch.ops.pgtoy.triple.default(key.transpose(1, 2).squeeze(0))
        return tripled + last.amax() + halves[1].amax(), doubled


class Joined(nn.Module):
    """A result that is concatenated, too, as in Zamba2: Inductor computes it in the memory of the whole."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.ops.pgtoy.triple.default(hidden)[None]
        second = first + hidden.cos()[None]
        return torch.cat([second, first], dim=-1).tanh(), second


Make = Callable[[Any], Any]


def hidden_of(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(num_tokens))


SLOW = pytest.mark.slow

CASES = [
    pytest.param(Transposed(), "positions", lambda n: torch.arange(1.0, n + 1.0), id="transposed", marks=SLOW),
    pytest.param(OneHead(), "hidden", hidden_of, id="one head"),
    pytest.param(WrittenInPlace(), "hidden", hidden_of, id="written"),
    pytest.param(Joined(), "hidden", hidden_of, id="joined", marks=SLOW),
]


@pytest.mark.parametrize(("module", "name", "example"), CASES)
def test_strides_with_unbacked_sizes_are_those_of_the_trace(
    module: nn.Module, name: str, example: Callable[[int], torch.Tensor]
) -> None:
    """Values and strides are the module's own, at whatever length."""
    config = pg.CompileConfig(split_ops=("pgtoy::triple",), compile_workers=0, cache=False, strict=True)
    with pg.compile(module, config, dynamic_dims={name: 0}, example_inputs=(example(4),)) as compiled:
        for num_tokens in (7, 1, 4, 33):
            value = example(num_tokens)
            found, wanted = compiled(value), module(value)
            found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)
                assert num_tokens == 1 or one.stride() == other.stride()


def _graph(make: Make) -> fx.GraphModule:
    """`make` of one input `[n, 4]`, as a piece of a dynamic size."""
    graph = fx.Graph()
    graph.output((make(fx.Proxy(graph.placeholder("x"))).node,))
    mode = fresh_fake_mode()
    (size,) = make_symbols(mode, [{"name": "u0", "lower": 1, "upper": None, "hint": None}]).values()
    with mode:
        example = torch.empty(size, 4)
    module = fx.GraphModule({}, graph)
    propagate_fakes(module, [example], mode)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x * 2,  # the outermost stride has no size in it
        lambda x: x.t(),  # a view of an input has the input's strides
        lambda x: (x * 2)[None],  # a dim of one has any stride
    ],
)
def test_outputs_whose_strides_inductor_keeps_are_left_alone(make: Make) -> None:
    module = _graph(make)
    assert with_exact_strides(module) is module


def test_a_fixed_graph_computes_the_same_with_the_same_strides() -> None:
    """The graph that was given is not changed."""
    module = _graph(lambda x: x.t() * 2)
    code = module.code
    fixed = with_exact_strides(module)
    value = torch.randn(5, 4)
    (found,), (wanted,) = fixed(value), module(value)
    assert (found.stride(), module.code) == (wanted.stride(), code)
    assert torch.equal(found, wanted)


def test_dims_by_stride() -> None:
    mode = fresh_fake_mode()
    (n,) = make_symbols(mode, [{"name": "u0", "lower": 1, "upper": None, "hint": None}]).values()
    with mode:
        table = torch.empty(1, n, 4).transpose(1, 2).mul(1)
        dense = torch.empty_strided((2, n, 4), (4 * n, 1, n))
        gap, overlap = torch.empty_strided((2, n), (2 * n, 1)), torch.empty_strided((n, 4), (1, 1))
    assert dims_by_stride(dense) == (0, 2, 1)
    assert dims_by_stride(gap) is None
    assert dims_by_stride(overlap) is None
    assert [has_unbacked_strides(each) for each in (table, dense, gap, overlap)] == [False, True, True, False]
