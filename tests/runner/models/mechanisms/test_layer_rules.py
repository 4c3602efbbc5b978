"""Chunks and scales by position, set on the modules that have them."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.transformers_attention import CHUNK_SIZE_ATTRIBUTE, TEMPERATURE_ATTRIBUTE
from piecegraph.runner.models.mechanisms.layer_rules import apply_layer_rules, first_layer_with_rules
from tests.runner.tiny_models import make_model


def rules(model: Any) -> list[tuple[int | None, tuple[int, float] | None]]:
    attention = [layer.self_attn for layer in model.model.layers]
    return [(getattr(a, CHUNK_SIZE_ATTRIBUTE, None), getattr(a, TEMPERATURE_ATTRIBUTE, None)) for a in attention]


def test_rules_are_set_where_texts_are_long_enough() -> None:
    """The last layer sees all, has no rotary embedding, and scales its queries; twice is once."""
    model = make_model("llama4")
    for _ in range(2):
        assert apply_layer_rules(model, 64) == ()
        assert rules(model) == [(8, None), (8, None), (8, None), (None, (6, 2.0))]
    assert not any(layer.self_attn.attn_temperature_tuning for layer in model.model.layers)


def test_short_texts_need_none() -> None:
    model = make_model("llama4")
    (note,) = apply_layer_rules(model, 5)
    assert note.startswith("chunked attention: max_model_len=5 is within one chunk of 8 tokens")
    assert rules(model) == [(None, None)] * 4
    assert apply_layer_rules(make_model("llama"), 64) == ()


def test_a_model_says_that_it_has_rules() -> None:
    model: Any = make_model("llama4")
    assert first_layer_with_rules(model) == "model.layers.0.self_attn attends within chunks"
    model.config.layer_types = ["full_attention"] * 4
    assert first_layer_with_rules(model) == "model.layers.0.self_attn scales queries by their position"
    assert first_layer_with_rules(make_model("llama")) is None


@pytest.mark.parametrize("size", [None, 0, True, 2.5])
def test_chunks_without_a_size_are_refused(size: object) -> None:
    model = make_model("llama4")
    object.__setattr__(model.config, "attention_chunk_size", size)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn attends within chunks, .*attention_chunk_size"):
        apply_layer_rules(model, 64)


def test_a_scale_of_another_form_is_refused() -> None:
    model: Any = make_model("llama4")
    del model.model.layers[0].self_attn.floor_scale
    with pytest.raises(UnsupportedModel, match=r"Llama4TextAttention\) has attn_temperature_tuning, but not floor_sc"):
        apply_layer_rules(model, 64)
