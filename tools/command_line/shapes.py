"""Model shapes a bench can make from nothing: a config, and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from piecegraph.errors import ModelError, did_you_mean

PREFIX = "shape:"

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "llama-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "full_attention_interval": 4,  # the layers between have states: gated delta nets
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
"""The shapes peers publish figures for. Read off those models' published configs."""


HEAD_TOKENS = 32_000
"""The vocabulary of a head for a shape, as published EAGLE-3 heads have it."""


def model_folder(model: str, scratch: Path) -> str:
    """Return `model` itself, or for `shape:NAME` a folder made in `scratch` with that shape's config.

    `shape:NAME:LAYERS` is the shape with that many layers. Raises `ModelError` for an unknown shape, and for a number
    of layers that is not an integer of at least 1.
    """
    if not model.startswith(PREFIX):
        return model
    name, colon, layers = model.removeprefix(PREFIX).partition(":")
    if name not in SHAPES:
        raise ModelError(f"there is no shape {name!r}.{did_you_mean(name, SHAPES)}")
    if colon and not (layers.isdecimal() and int(layers) > 0):
        raise ModelError(f"{model!r} asks for {layers!r} layers; give a number, such as {PREFIX}{name}:8.")
    config = {**SHAPES[name], "num_hidden_layers": int(layers)} if colon else SHAPES[name]
    folder = scratch / model.removeprefix(PREFIX).replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def head_folder(head: str, scratch: Path) -> str:
    """Return `head` itself, or for `shape:NAME` a folder made in `scratch` with the config of an EAGLE-3 head for it.

    The head has one layer of the shape's sizes. Raises `ModelError` as `model_folder` does.
    """
    if not head.startswith(PREFIX):
        return head
    model = json.loads(Path(model_folder(head, scratch), "config.json").read_text())
    layer = {name: value for name, value in model.items() if name in _HEAD_SIZES}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": min(HEAD_TOKENS, model["vocab_size"]),
        "transformer_layer_config": {**layer, "model_type": "llama", "num_hidden_layers": 1},
    }
    folder = scratch / f"{head.removeprefix(PREFIX).replace(':', '-')}-eagle3"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


_HEAD_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act"),
)
"""What a head for a shape has as the shape's layers have it."""
