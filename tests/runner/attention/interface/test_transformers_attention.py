"""What our attention refuses, it refuses by name, and before any piece compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from piecegraph import CompileConfig
from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.repeated_layers.find import name_layers
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.layer import AttentionLayer, attention_layers
from piecegraph.runner.attention.interface.transformers_attention import (
    CHUNK_SIZE_ATTRIBUTE,
    TEMPERATURE_ATTRIBUTE,
    needs_positions,
    transformers_attention,
)

Call = Callable[..., tuple[torch.Tensor, None]]


class Attention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = x.view(1, -1, 4, 8).transpose(1, 2)
        key = query[:, :2] * 2
        out, _ = transformers_attention(self, query, key, key[..., :5], None, **self.options)  # type: ignore[arg-type]
        return out.flatten(2) + 1


class Decoder(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results: list[torch.Tensor] = [layer(x) for layer in self.layers]
        return torch.cat(results)


def traced_layers(*layers: nn.Module) -> tuple[AttentionLayer, ...]:
    """The layers found when a model of `layers` is compiled."""
    found: list[AttentionLayer] = []
    model = Decoder(*layers).eval()
    name_layers(model)
    compiled = compile_module(
        model,
        CompileConfig(compiler="eager"),
        dynamic_dims={"x": {0: "num_tokens"}},
        example_inputs=(torch.zeros(5, 32),),
        before_compile=lambda calls: found.extend(attention_layers(calls)),
    )
    compiled.close()
    return tuple(found)


def test_layers_are_read_off_the_graph() -> None:
    """Heads, head sizes, scale, window and soft cap come from the calls; the name from the model."""
    plain, windowed = traced_layers(Attention(), Attention(scaling=0.5, sliding_window=7, softcap=30.0))
    assert (plain.name, windowed.name) == ("layers.0", "layers.1")
    assert (plain.num_q_heads, plain.num_kv_heads, plain.key_dim, plain.value_dim) == (4, 2, 8, 5)
    assert (plain.scale, plain.window, plain.softcap, plain.has_sinks) == (8**-0.5, 0, 0.0, False)
    assert (windowed.scale, windowed.window, windowed.softcap) == (0.5, 7, 30.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_bias": 1.0}, "layers.0: passes 'position_bias' to its attention, which we do not know"),
        ({"is_causal": False}, "layers.0: is not causal"),
        ({"dropout": 0.1}, "layers.0: applies dropout"),
    ],
)
def test_a_call_that_would_change_attention_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        traced_layers(Attention(**options))


def test_what_does_not_change_attention_is_let_through() -> None:
    """Including unknown arguments that are off."""
    assert traced_layers(Attention(position_ids=torch.arange(3), output_attentions=False, block_indices=None))


def test_an_attention_module_that_runs_twice_is_refused() -> None:
    """Its second call would overwrite the first one's cache."""
    shared = Attention()
    with pytest.raises(UnsupportedModel, match=r"layers\.0 runs more than once"):
        traced_layers(shared, shared)


def test_what_a_module_says_of_itself_is_part_of_its_call() -> None:
    """Chunks become an argument of the op; a scale by position needs positions."""
    chunked, plain = Attention(), Attention()
    setattr(chunked, CHUNK_SIZE_ATTRIBUTE, 3)
    assert [layer.chunk_size for layer in traced_layers(chunked, plain)] == [3, 0]
    growing = Attention()
    setattr(growing, TEMPERATURE_ATTRIBUTE, (8, 0.1))
    assert needs_positions(nn.ModuleList([growing])) and not needs_positions(chunked)
    with pytest.raises(UnsupportedModel, match=r"layers\.0: scales queries by their position"):
        traced_layers(growing)


def test_a_mask_is_refused() -> None:
    class Masked(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = x.view(1, -1, 4, 8).transpose(1, 2)
            return transformers_attention(self, query, query, query, x)[0].flatten(2)

    with pytest.raises(UnsupportedModel, match=r"layers\.0: passes an attention mask"):
        traced_layers(Masked())
