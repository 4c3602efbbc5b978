"""A model whose code is not one graph is refused with the module that is the reason, and what it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from piecegraph.compiler.tracing.trace import trace
from piecegraph.errors import CompileError, UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.inspect.untraceable import refused_by_module
from tests.runner.architectures import save_tiny, tiny_model


class Loops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in (x > 0).nonzero():
            x = x + row.sum()
        return x


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 100:
            return x * 2
        return x + 1


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(x.dtype) * 1
        return x + self.table


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(open("/dev/null").read() or 0)


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), layer])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Loops(), r"layers\.1 \(Loops\) repeats a loop as often as .* \(for row in \(x > 0\)\.nonzero\(\):\)"),
        (Asks(), r"layers\.1 \(Asks\) asks for the size or the values of a step, .* \(if x\.shape\[0\] > 100:\)"),
        (Replaces(), r"layers\.1 \(Replaces\) replaces an attribute of its own in its forward \(self\.table = "),
        (Reads(), r"layers\.1 \(Reads\) runs code that cannot be traced \(return x \+ float\(open"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_module_and_what_it_does_are_named(layer: nn.Module, reason: str) -> None:
    model = Model(layer)
    with pytest.raises(UnsupportedModel, match=reason) as caught, refused_by_module(model):
        trace(model, (torch.ones(3, 4),), {}, {"x": {0: "num_tokens"}})
    assert isinstance(caught.value.__cause__, CompileError)


def test_errors_of_other_code_stay_what_they_are() -> None:
    with pytest.raises(CompileError, match="depends on the value"), refused_by_module(nn.Linear(2, 2)):
        trace(Model(Asks()), (torch.ones(3, 4),), {}, {"x": {0: "num_tokens"}})


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("zaya", r"self_attn\.qkv_proj \(ZayaCCAProjection\) keeps a state .* It has q_proj"),
        ("rembert", r"attention\.self is a decoder's by the config, but the code of transformers .* no causal mask"),
        ("blt", r"model \(BltModel\) joins tokens to patches, as many as their values say"),
    ],
)
def test_a_mechanism_that_is_missing_is_named(model_type: str, reason: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    if "no causal mask" in reason and hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
        pytest.skip("from transformers 5.24 on this decoder gets a causal mask")
    folder = save_tiny(model_type, model, tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        explain(EngineConfig(source=ModelSource(model=str(folder)), device="cpu", max_model_len=48))
