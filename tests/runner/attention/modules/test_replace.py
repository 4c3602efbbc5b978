"""Modules that compute attention themselves get a class of ours by their structure; what differs stays as it is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from piecegraph.runner.attention.modules.attend import POOLS_ATTRIBUTE
from piecegraph.runner.attention.modules.by_value import ValueBiasedAttention, most_tokens
from piecegraph.runner.attention.modules.clipped import ClippedAttention
from piecegraph.runner.attention.modules.differential import DifferentialAttention
from piecegraph.runner.attention.modules.local import LocalAttention
from piecegraph.runner.attention.modules.merged import (
    PartlyRotaryMergedAttention,
    ResidualMergedAttention,
    RotaryMergedAttention,
)
from piecegraph.runner.attention.modules.replace import WITHOUT_INTERFACE, replace_attention, sees_later_tokens
from piecegraph.runner.attention.modules.rotary_pairs import MergedRotaryPairsAttention, SeparateRotaryPairsAttention
from piecegraph.runner.attention.modules.separate import RotarySelfAttention, SelfAttention, SeparateAttention
from piecegraph.runner.attention.modules.transposed import TransposedAttention
from piecegraph.runner.attention.varlen.transformers_varlen import VARLEN_IMPLEMENTATION
from tests.runner.architectures import shrunk, tiny_config

KINDS: dict[str, type[nn.Module]] = {
    "gptj": SeparateRotaryPairsAttention,
    "codegen": MergedRotaryPairsAttention,
    "gpt_neo": LocalAttention,
    "falcon": RotaryMergedAttention,
    "bloom": ResidualMergedAttention,
    "mpt": ClippedAttention,
    "diffllama": DifferentialAttention,
    "gpt_neox_japanese": PartlyRotaryMergedAttention,
    "xglm": SeparateAttention,
    "megatron-bert": SelfAttention,
    "rembert": SelfAttention,
    "roformer": RotarySelfAttention,
    "openai-gpt": TransposedAttention,
    "doge": ValueBiasedAttention,
}
"""The kind of the attention of each model type."""

PARTS = ("out_proj", "dense", "o_proj", "c_attn", "value")
"""Submodules by which the attention of each model type is found here."""


def made(model_type: str) -> Any:
    """A tiny model; the test is skipped where its attention calls the interface, as GPT-J's does from 5.24 on."""
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation=WITHOUT_INTERFACE)
    layer = next((module for module in model.modules() if hasattr(module, "out_proj")), model)
    if model_type in ("gptj", "codegen") and "attention_interface" in inspect.getsource(type(layer).forward):
        pytest.skip(f"the attention of {model_type} calls the interface in transformers {transformers.__version__}")
    return model


def layers_of(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if type(module) is kind]


@pytest.mark.parametrize("model_type", KINDS)
def test_each_layer_gets_the_class_of_its_kind(model_type: str) -> None:
    """Parameters stay the same tensors, under the same names."""
    model = made(model_type)
    before = dict(model.named_parameters())
    assert replace_attention(model)
    assert len(layers_of(model, KINDS[model_type])) == 2
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


def with_norm(layer: Any) -> None:
    layer.another_norm = nn.LayerNorm(8)


def of_half_the_heads(layer: Any) -> None:
    layer.num_attention_heads = layer.num_heads = layer.n_heads = 2
    if hasattr(layer, "groupnorm"):
        layer.head_dim = 16


def of_another_size(layer: Any) -> None:
    layer.split_size = 16
    layer.head_dim = 4


def without_a_window(layer: Any) -> None:
    layer.attention_type = "local"
    layer.config.window_size = 0


def with_rotary_embedding_of_all(layer: Any) -> None:
    layer.rotary_dim = None


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        *((name, with_norm) for name in KINDS),
        *((name, of_half_the_heads) for name in KINDS if name not in ("openai-gpt", "doge")),
        ("openai-gpt", of_another_size),
        ("doge", of_another_size),
        ("gptj", with_rotary_embedding_of_all),
        ("gpt_neo", without_a_window),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_layer_that_differs_stays_as_it_is(model_type: str, change: Callable[[Any], None]) -> None:
    model, untouched = made(model_type), made(model_type)
    assert replace_attention(untouched)
    layers = [module for module in model.modules() if any(hasattr(module, name) for name in PARTS)]
    for layer in layers:
        change(layer)
    kinds = [type(layer) for layer in layers]
    assert not replace_attention(model)
    assert [type(layer) for layer in layers] == kinds


def test_a_class_of_another_package_stays_as_it_is() -> None:
    """Its code may compute anything under the same names."""
    model = made("gptj")
    for layer in list(model.modules()):
        if hasattr(layer, "q_proj"):
            layer.__class__ = type("GPTJAttention", (type(layer),), {"__module__": "remote.modeling"})
    assert not replace_attention(model)


@pytest.mark.parametrize("name", ["YosoConfig", "NystromformerConfig", "MraConfig"])
def test_code_that_computes_something_else_stays_as_it_is(name: str) -> None:
    """Modules with the parts of BERT's that attend to some keys only, or in another way."""
    config_class = getattr(transformers, name)
    model = AutoModel.from_config(config_class(**shrunk(config_class, {})), attn_implementation=WITHOUT_INTERFACE)
    layer = next(module for module in model.modules() if hasattr(module, "value"))
    layer.is_decoder = False
    assert not replace_attention(model)


def test_decoders_without_a_causal_mask_are_told_from_encoders() -> None:
    """transformers lets the tokens of a prompt see each other in some decoders; in these no longer from 5.24 on."""
    decoder, encoder = made("rembert"), made("rembert")
    for module in encoder.modules():
        if hasattr(module, "is_decoder"):
            module.is_decoder = False
    is_causal = hasattr(sys.modules[type(decoder).__module__], "create_causal_mask")
    for model, expected in ((decoder, is_causal), (encoder, False)):
        assert replace_attention(model) and sees_later_tokens(made("xglm")) is None
        assert [module.is_causal for module in layers_of(model, SelfAttention)] == [expected, expected]
    assert sees_later_tokens(encoder) is None
    found = sees_later_tokens(decoder)
    assert found is None if is_causal else found is not None
    assert found is None or found.startswith("rembert.encoder.layer.0.attention.self is a decoder's")


def test_the_longest_text_of_attention_by_value() -> None:
    model = made("doge")
    assert replace_attention(model)
    assert most_tokens(model) == 2048 and most_tokens(made("gptj")) is None


def test_modules_of_a_model_that_pools_say_so() -> None:
    model = made("gptj")
    assert replace_attention(model, pools=True)
    assert all(hasattr(layer, POOLS_ATTRIBUTE) for layer in layers_of(model, SeparateRotaryPairsAttention))
    assert model.config._attn_implementation == VARLEN_IMPLEMENTATION
