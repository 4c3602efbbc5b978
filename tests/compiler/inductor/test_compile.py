"""What Inductor compiles of a dynamic size is right for every size, or is not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import piecegraph as pg
from piecegraph.compiler.inductor import compile as inductor_compile
from piecegraph.errors import CompileError

SIZES = (5, 1, 2, 33)


class NormOfHeads(nn.Module):
    """Rows of heads are normed and gated, and viewed as rows of tokens: (4 * tokens, 8) becomes (tokens, 32)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8))
        self.project = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, 4, 8).flatten(0, 1)
        normed = self.weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
        projected: torch.Tensor = self.project((normed * torch.sigmoid(rows)).view(x.shape[0], -1))
        return projected


class OneFrequency(nn.Module):
    """The rotary table of heads that rotate two elements: all of its dims but one are 1 in size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequency = torch.tensor([[[0.5]]])
        angles = (frequency @ x[None, None, :, 0].float()).transpose(1, 2)
        cos = torch.cat((angles, angles), dim=-1).cos().unsqueeze(1)
        return torch.cat((x[None, None, :, :2] * cos, x[None, None, :, 2:]), dim=-1)


class Transposed(nn.Module):
    """The result has a dynamic stride, so it is made again with the strides of the trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().cos() * 2


class Experts(nn.Module):
    """Every expert sees all rows, scaled by its score, as in Llama 4: products of three dims, the middle one dynamic.

    The scores of one row are in memory beside each other in two ways if there is one row.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.weight = nn.Linear(32, 4, bias=False), nn.Parameter(torch.randn(4, 32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        scaled = x.repeat(4, 1) * torch.sigmoid(scores).transpose(0, 1).reshape(-1, 1)
        return torch.bmm(scaled.view(4, -1, 32), self.weight).sum(0)


class Grouped(nn.Module):
    """Rows are sorted by what they hold and split by how many there are of each, as in JetMoe."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = (x[:, 0].abs() * 10).long() % 3
        counts = torch.zeros(3, dtype=torch.long).scatter_add(0, group, torch.ones_like(group)).tolist()
        parts = x[torch.argsort(group, stable=True)].split(counts, dim=0)
        return torch.stack([(part @ weight).sum(0) for part, weight in zip(parts, self.weight, strict=True)])


def rows(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(num_tokens))


def compiled(module: nn.Module, **options: Any) -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=(), compile_workers=0, **{"cache": False, "strict": True, **options})
    return pg.compile(module, config, dynamic_dims={"x": 0}, example_inputs=(rows(4),))


@pytest.mark.parametrize(
    "module",
    [
        NormOfHeads(),
        OneFrequency(),
        pytest.param(Experts(), marks=pytest.mark.slow),
        pytest.param(Grouped(), marks=pytest.mark.slow),
    ],
    ids=["views", "strides", "experts", "groups"],
)
def test_numbers_are_the_modules_at_every_size(module: nn.Module) -> None:
    """torch alone takes the view for one that is right for one token only, and asks which format the strides have, and
    which layout an operand."""
    with compiled(module) as model:
        for size in SIZES:
            torch.testing.assert_close(model(rows(size)), module(rows(size)))


def assume_two_at_most(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Narrow the range of every size of a piece, as a compile that decides a comparison by an assertion does."""
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta["example_value"]
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                torch._check(size <= 2)
    return graph_module


def test_a_piece_that_assumes_a_size_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is assumed, the range of the size shows it."""
    monkeypatch.setattr(inductor_compile, "with_exact_strides", assume_two_at_most)
    module = NormOfHeads()
    with compiled(module, strict=False) as model:
        for size in SIZES:
            torch.testing.assert_close(model(rows(size)), module(rows(size)))
        assert "SizesAssumed: it would be right for some sizes only (u0: 1 to " in model.report().eager_pieces[0]
    with pytest.raises(CompileError, match="right for some sizes only"):
        compiled(module)


def test_a_piece_with_fixed_strides_can_be_stored() -> None:
    with compiled(Transposed(), cache="pieces") as model:
        assert "could not be stored" not in str(model.report())
        torch.testing.assert_close(model(rows(3)), Transposed()(rows(3)))
