"""Whatever small decoder and whatever ragged batch: the tokens are transformers'."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph import LLM, SamplingParams
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import VOCAB_SIZE, make_config, random_model, save

_heads = st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (6, 3)])
_prompts = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30), min_size=1, max_size=5)


@st.composite
def _decoders(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    num_heads, num_kv_heads = draw(_heads)
    num_layers = draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([8, 16]))
    options: dict[str, Any] = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": num_layers,
        "hidden_size": num_heads * 8,
        "head_dim": head_dim,
        "intermediate_size": draw(st.sampled_from([16, 40])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
    }
    name = draw(st.sampled_from(["LlamaConfig", "MistralConfig", "Qwen3Config", "Gemma2Config"]))
    window = draw(st.integers(2, 20))  # of 1, transformers' own cache keeps all keys ([-0:])
    if name == "MistralConfig":
        options["sliding_window"] = draw(st.sampled_from([None, window]))
    if name == "Gemma2Config":
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        layer_types = draw(st.lists(kinds, min_size=num_layers, max_size=num_layers))
        softcap = draw(st.sampled_from([None, 3.0]))
        options |= {"sliding_window": window, "layer_types": layer_types, "attn_logit_softcapping": softcap}
    return name, options


@pytest.mark.slow
@pytest.mark.parametrize("max_examples", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_random_decoder_on_a_ragged_batch(max_examples: int) -> None:
    """Any heads, depth, windows and soft caps; prompts in chunks of any size over blocks of any size."""
    given_any = given(decoder=_decoders(), prompts=_prompts, budget=st.integers(3, 64), block_size=st.integers(1, 20))
    settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])(given_any(check))()


def check(decoder: tuple[str, dict[str, Any]], prompts: list[list[int]], budget: int, block_size: int) -> None:
    name, options = decoder
    model = random_model(make_config(name, **options))
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            save(model, Path(folder)),
            skip_tokenizer_init=True,
            dtype="float32",
            compiler="eager",
            max_num_batched_tokens=budget,
            block_size=block_size,
        ) as llm,
    ):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(temperature=0.0, max_tokens=8)
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)
