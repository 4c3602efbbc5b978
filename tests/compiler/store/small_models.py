"""Models that compile in a second: a split op between library calls, for which Inductor generates no C++."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
import tests.compiler.toy  # noqa: F401  (defines the split op)

SIZE = 4
DIMS = {"x": {0: "num_tokens"}}


class Layer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.pgtoy.triple.default(self.linear(x))
        return result


class Small(nn.Module):
    """`x [num_tokens, SIZE]` to the same; `scale` is an attribute that is read nowhere."""

    def __init__(self, num_layers: int = 2, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([Layer(scale) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def config(**options: Any) -> pg.CompileConfig:
    """In this process, cut at the toy's op, and cached."""
    return pg.CompileConfig(**{"split_ops": ("pgtoy::triple",), "compile_workers": 0, "passes": (), **options})


def compiled(model: nn.Module, rows: int = 3, **options: Any) -> pg.CompiledModel:
    """`model`, compiled for `rows` example rows that may vary."""
    return pg.compile(model, config(**options), dynamic_dims=DIMS, example_inputs=(torch.ones(rows, SIZE),))


def call_by_name(model: nn.Module) -> None:
    """Compile `model` as torch finds us by name, and call it once. torch knows of no compile of `model`'s code before:
    else it would take that."""
    options: dict[str, Any] = {"split_ops": ("pgtoy::triple",), "compile_workers": 0, "passes": ()}
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend="piecegraph", fullgraph=True, options=options)(torch.ones(3, SIZE))


def state(model: pg.CompiledModel) -> str:
    """What the cache came to: "hit", "miss" or "off"."""
    return model.report().cache.state


@pytest.fixture
def whole_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that keeps plans too."""
    root = tmp_path / "cache"
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(root))
    return root
