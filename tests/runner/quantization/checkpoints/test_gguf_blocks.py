"""Blocks of every kind stand for what the package gguf dequantises them to, and files of them run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from piecegraph.errors import CheckpointError, ConfigError, ModelError, UnsupportedModel
from piecegraph.runner.quantization.checkpoints.gguf_blocks import KINDS, GgufBlocks
from piecegraph.runner.quantization.checkpoints.gguf_file import gguf_quantization
from piecegraph.runner.quantization.checkpoints.headers import check_tensors_of
from piecegraph.runner.quantization.methods.all_methods import METHODS
from tests.runner.quantization.checkpoints.written import slices
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
    wanted_tensors = checkpoint.tensors("layers.0", scheme, (6, wanted.shape[1]), ())
    check_tensors_of("layers.0", slices({"weight_blocks": blocks}), wanted_tensors)
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight_blocks is U8 \[6, .* the module needs U8 \[6, "):
        check_tensors_of("layers.0", slices({"weight_blocks": blocks[:, :-1]}), wanted_tensors)
    with pytest.raises(CheckpointError, match=r"layers\.0 has 40 columns in the model, which blocks of "):
        checkpoint.tensors("layers.0", scheme, (6, 40), ())


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


def q8_and_q4(name: str) -> str:
    return "Q8_0" if "embd" in name else "Q4_1"


def q4_k_m(name: str) -> str:
    """Return the kind of a tensor in the mixture that llama.cpp calls Q4_K_M, here with two more kinds in it."""
    if name.startswith("blk.1") and name.endswith(("attn_k", "ffn_up")):
        return "Q5_K" if name.endswith("attn_k") else "F16"
    return "Q6_K" if name == "output" or name.endswith(("attn_v", "ffn_down")) else "Q4_K"


def blocks_of(rows: torch.Tensor, kind: str) -> np.ndarray:
    """Return rows as blocks; those of kinds that the package gguf does not make have random numbers in them."""
    if not kind.endswith("_K"):
        made: np.ndarray = gguf.quantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
        return made
    return random_blocks(kind, rows.shape[0], rows.shape[1] // 256).numpy()


def write_gguf(model: PreTrainedModel, file: Path, kind_of: Callable[[str], str] = q8_and_q4) -> None:
    """Write a Llama in blocks of the kinds that `kind_of` gives tensors by name, with the writer of the package."""
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
        for tensor, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if stored.endswith(tensor):
                rows = rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)
        data = rows.numpy()
        if rows.ndim == 1:
            writer.add_tensor(f"{stored}.weight", data.astype(np.float32))
            continue
        kind = kind_of(stored)
        writer.add_tensor(f"{stored}.weight", blocks_of(rows, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
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


def test_a_head_of_its_own_in_floats_stays_in_floats(tmp_path: Path) -> None:
    """As `llama-quantize --leave-output-tensor` writes it; a head without a tensor shares the embedding's blocks."""
    file = tmp_path / "model.gguf"
    config = make_config("LlamaConfig", intermediate_size=64, tie_word_embeddings=False)
    write_gguf(random_model(config), file, lambda name: "F16" if name == "output" else q8_and_q4(name))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with load(file, quantization="gguf", dtype="float32", enforce_eager=True) as llm:
        assert largest_difference(reference, llm) < 1e-4
        assert any("1 x Linear.weight (not quantised in the checkpoint)" in note for note in llm.notes)


@pytest.mark.slow
def test_a_file_with_blocks_of_several_kinds_runs_in_them(tmp_path: Path) -> None:
    """As nearly all files are: here each kind of K blocks and float16, and no head of the embedding's."""
    file = tmp_path / "model.gguf"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": False}
    write_gguf(random_model(make_config("LlamaConfig", **sizes)), file, q4_k_m)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with load(file, quantization="gguf", dtype="float32", compiler="eager") as llm:
        assert largest_difference(reference, llm) < 1e-4
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        for each in (
            "8 linears are int4 in groups of 32",
            "5 linears are int8-groups in groups of 16",
            "1 linears are int8-groups in groups of 32",
            "1 embeddings are int4 in groups of 32",
            "1 x Linear.weight (not quantised in the checkpoint)",
        ):
            assert each in note, note


@pytest.mark.parametrize("kept", [0.7, *(pytest.param(part, marks=pytest.mark.slow) for part in (0.1, 0.999))])
def test_a_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(random_model(make_config("LlamaConfig", intermediate_size=64, tie_word_embeddings=True)), file)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ModelError, match="model.gguf': .* It may be truncated: copy or download") as raised:
        load(file, quantization="gguf", enforce_eager=True)
    assert raised.value.exit_code == 3


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
