"""Unsupported models and impossible sizes are refused before weights are read; the mechanism or field is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, PreTrainedConfig

from piecegraph.errors import CheckpointError, ModelError, UnsupportedModel
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.load import load_model
from piecegraph.runner.models.mechanisms.support import (
    MAX_SIZES,
    causality,
    check_class,
    check_config,
    check_layers,
    check_model_sizes,
)
from tests.runner.architectures import tiny_config
from tests.runner.tiny_models import CHUNKED, FAMILIES, llama_config

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("T5Config", {"is_encoder_decoder": True}, "encoder-decoder"),
    (
        "RwkvConfig",
        {"num_hidden_layers": 2},
        r"keeps a recurrent state .* rwkv\.blocks\.0 .* would need",
    ),
    ("WhisperConfig", {"decoder_layers": 1, "is_encoder_decoder": False}, r"would need a forward .* is proj_out"),
    ("RecurrentGemmaConfig", {"num_hidden_layers": 2}, "layers of type|keeps a state between tokens"),
    ("XLNetConfig", {"n_layer": 1}, "XLNetModel. predicts a token in the place of an empty one"),
    ("Qwen3NextConfig", {"num_hidden_layers": 2, "hidden_act": "gelu"}, "GatedDeltaNet. keeps a state between tokens"),
    ("DeepseekV32Config", {}, "layers of type (deepseek_sparse|indexed)_attention"),
    ("ViTConfig", {}, "ViTConfig .* has no causal language model"),
]


def check(config: PreTrainedConfig) -> None:
    """Check a model as loading does; there are no weights to read."""
    check_config(config)
    load_model(ModelSource(model="./nowhere"), config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_refused_by_mechanism(name: str, options: dict[str, Any], message: str) -> None:
    """No weights exist, so none can have been read."""
    config = getattr(transformers, name)(**options)
    with pytest.raises(UnsupportedModel, match=message):
        check(config)


def test_a_decoder_without_a_causal_mask_is_refused() -> None:
    """Newer versions of transformers make that mask for RemBERT, so there its weights are looked for."""
    config = transformers.RemBertConfig(num_hidden_layers=1, is_decoder=True)
    with pytest.raises((UnsupportedModel, CheckpointError), match="makes no causal mask|no weights to read"):
        check(config)


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("Gemma4AssistantForCausalLM", "attends to the keys and values of another model's layers"),
        ("xLSTMForCausalLM", "keeps a recurrent state between tokens"),
        ("ProphetNetForCausalLM", "predicts several tokens at each place"),
        ("WhisperForCausalLM", "computes the logits of every row"),
    ],
)
def test_a_class_without_what_is_needed_is_refused_for_what_it_does(name: str, mechanism: str) -> None:
    """A missing argument is a line of code; what the model does instead is the reason."""
    with pytest.raises(UnsupportedModel, match=f"{name} {mechanism}"):
        check_class(getattr(transformers, name))


def test_attention_classes_of_a_model_s_own_are_named() -> None:
    source = ModelSource(model="./nowhere", load_format="dummy")
    with pytest.raises(UnsupportedModel, match=r"each layer's GitAttention picks one of a list .* would need"):
        load_model(source, tiny_config("git"), dtype=torch.float32, device=torch.device("cpu"))


def test_a_decoder_s_attention_is_causal_where_only_a_mask_makes_it_so() -> None:
    attention: Any = torch.nn.Module()
    attention.is_causal = attention.is_decoder = False
    assert causality(attention) == [False]
    attention.is_decoder = True
    assert causality(attention) == [True]


def test_dynamic_rope_is_refused_with_a_way_out() -> None:
    config = llama_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedModel, match=r"'dynamic' rotary embeddings, .*hf_overrides"):
        check_config(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_supported_families_pass(name: str) -> None:
    check_config(FAMILIES[name]())


def layers(windows: Sequence[int]) -> list[AttentionLayer]:
    return [
        AttentionLayer(
            name=f"layers.{i}",
            num_q_heads=4,
            num_kv_heads=2,
            key_dim=8,
            value_dim=8,
            dtype=torch.float32,
            scale=1.0,
            window=window,
            softcap=0.0,
            has_sinks=False,
        )
        for i, window in enumerate(windows)
    ]


@pytest.mark.parametrize(
    ("family", "windows", "message"),
    [
        ("llama", [0], r"only 1 of 2 layers call attention; the others \(the first is layers\.1\) would need"),
        ("gemma2", [0, 0], r"layers\.0 is sliding_attention by the config, but .* no window"),
        ("gemma2", [8, 8], r"layers\.1 is full_attention by the config, but .* a window of 8"),
        ("mistral", [0, 0], r"sliding_window=8, but no layer calls attention with a window, layers\.0 being the first"),
    ],
)
def test_attention_must_be_what_the_config_says(family: str, windows: list[int], message: str) -> None:
    """A window that only the mask knew of would be lost without a word: we build no masks."""
    with pytest.raises(UnsupportedModel, match=message):
        check_layers(layers(windows), FAMILIES[family]())


@pytest.mark.parametrize(("family", "windows"), [("llama", [0, 0]), ("gemma2", [8, 0]), ("mistral", [8, 8])])
def test_attention_that_agrees_passes(family: str, windows: list[int]) -> None:
    check_layers(layers(windows), FAMILIES[family]())


def test_a_window_that_holds_every_text_need_not_be_passed() -> None:
    """Each token sees all before it, with a window or without."""
    check_layers(layers([0, 0]), FAMILIES["mistral"](), max_model_len=8)
    with pytest.raises(UnsupportedModel, match="max_model_len=8 runs without"):
        check_layers(layers([0, 0]), FAMILIES["mistral"](), max_model_len=9)


@pytest.mark.parametrize(("chunks", "max_model_len"), [([8, 8, 8, 0], 64), ([0, 0, 0, 0], 8)])
def test_chunks_must_be_as_many_as_the_config_has(chunks: list[int], max_model_len: int) -> None:
    """None are, where a text is within one chunk."""
    config = CHUNKED["llama4"]()
    found = [replace(layer, chunk_size=chunk) for layer, chunk in zip(layers([0] * 4), chunks, strict=True)]
    check_layers(found, config, max_model_len=max_model_len)
    for wrong in ([*found[:3], replace(found[3], chunk_size=8)], [replace(found[0], chunk_size=4), *found[1:]]):
        with pytest.raises(UnsupportedModel, match=r"layers attend within chunks of 8 tokens, but . call attention so"):
            check_layers(wrong, config, max_model_len=64)


def test_an_unused_window_in_the_config_is_ignored() -> None:
    """A config may carry a field its class does not have; the model ignores it, and so do we."""
    config: PreTrainedConfig = llama_config(sliding_window=8)
    check_layers(layers([0, 0]), config)


def with_fields(**fields: Any) -> PreTrainedConfig:
    """A tiny Llama's config with `fields` set past the checks of its class."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


@pytest.mark.parametrize("name", MAX_SIZES)
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8", 10**18])
def test_an_invalid_size_is_refused_with_its_limit(name: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"{name}={value!r}; it must be a whole number from 1 to {MAX_SIZES[name]}"):
        check_model_sizes(with_fields(**{name: value}))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError, match="num_attention_heads=4 and num_key_value_heads=3"):
        check_model_sizes(with_fields(num_key_value_heads=3))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str) -> None:
    check_model_sizes(FAMILIES[family]())
