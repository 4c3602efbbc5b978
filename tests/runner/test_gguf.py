"""A GGUF file is a model like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import llama_config, random_model


def write_gguf(model: PreTrainedModel, file: Path) -> None:
    """`model`, a Llama, as llama.cpp would store it (rotary halves interleaved), in float32."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_answers_as_the_model_it_was_made_from(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = random_model(llama_config())
    write_gguf(model, tmp_path / "tiny.gguf")
    prompts = [[5, 6, 7, 8], [90]]
    with LLM(
        tmp_path / "tiny.gguf", skip_tokenizer_init=True, dtype="float32", compiler="eager", num_kv_blocks=16
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
        )
    assert model.dtype == torch.float32
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)
