"""Blocks of every kind stand for what the package gguf dequantises them to, and files of them run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from piecegraph.errors import CheckpointError, ConfigError, UnsupportedModel
from piecegraph.runner.quantization.checkpoints.gguf_blocks import KINDS, GgufBlocks
from piecegraph.runner.quantization.checkpoints.gguf_file import gguf_quantization
from piecegraph.runner.quantization.methods.all_methods import METHODS
from tests.runner.quantization.test_llm_quantised import largest_difference, load
from tests.runner.tiny_models import make_config, make_model, random_model, save

gguf = pytest.importorskip("gguf")


def random_blocks(kind: str, rows: int, per_row: int) -> torch.Tensor:
    """Return blocks of random bytes whose float16 numbers are small."""
    each = KINDS[kind].block_bytes
    blocks = torch.randint(0, 256, (rows * per_row, each), generator=torch.Generator().manual_seed(each))
    blocks = blocks.to(torch.uint8)
    halves = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for start in halves:
        numbers = torch.rand(rows * per_row, 1, generator=torch.Generator().manual_seed(start)).half() / 64
        blocks[:, start : start + 2] = numbers.view(torch.uint8)
    return blocks.view(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_stand_for_what_the_package_makes_of_them(kind: str) -> None:
    blocks = random_blocks(kind, 6, 2)
    wanted = torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))
    checkpoint = GgufBlocks.of({"blocks": {"layers.0": kind}})
    scheme = checkpoint.scheme_of("layers.0", "Linear")
    assert scheme is not None and checkpoint.scheme_of("layers.1", "Linear") is None
    packed = checkpoint.packed("layers.0", {"weight_blocks": blocks}, scheme, torch.float32)
    assert torch.allclose(METHODS[scheme.method].unpack(packed), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight_blocks is \[6, "):
        checkpoint.packed("layers.0", {"weight_blocks": blocks[:, :-1]}, scheme, torch.float32)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="layers.0 has blocks of the kind Q2_K, which cannot stay as they are"):
        GgufBlocks.of({"blocks": {"layers.0": "Q2_K"}})


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(model: PreTrainedModel, file: Path) -> None:
    """Write a Llama in blocks of Q8_0 and Q4_1, with the writer and the quantisers of the package gguf."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for name, weight in model.state_dict().items():
        path = name.removesuffix(".weight")
        if path == "lm_head" and config.tie_word_embeddings:
            continue
        parts = path.split(".")
        is_in_layer = parts[1:2] == ["layers"]
        stored = f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}" if is_in_layer else NAMES[path]
        rows = weight.float()
        for kind, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if stored.endswith(kind):
                rows = rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)
        data = rows.numpy()
        if rows.ndim == 1:
            writer.add_tensor(f"{stored}.weight", data.astype(np.float32))
            continue
        kind = gguf.GGMLQuantizationType["Q8_0" if "embd" in stored else "Q4_1"]
        writer.add_tensor(f"{stored}.weight", gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_runs_in_its_blocks(tmp_path: Path) -> None:
    """transformers' reading of the same file into floats is the reference."""
    file = tmp_path / "model.gguf"
    write_gguf(random_model(make_config("LlamaConfig", intermediate_size=64, tie_word_embeddings=True)), file)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with load(file, quantization="gguf", dtype="float32", enforce_eager=True) as llm:
        assert largest_difference(reference, llm) < 1e-4
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert "14 linears are int4 in groups of 32" in note and "embeddings are int8-groups in groups of 32" in note


def test_only_gguf_files_have_blocks(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="quantization='gguf' keeps the blocks of a .gguf file, and the model is none"
    ):
        load(save(make_model("llama"), tmp_path), quantization="gguf")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="has the architecture 'mamba', whose blocks cannot stay as they are"):
        gguf_quantization(file)
