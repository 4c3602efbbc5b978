"""A tiny random model of every architecture that transformers has as a causal language model.

The sizes of a config class are lowered by the names of its fields; what a class needs besides is in `OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 128
MAX_LEN = 96

_NAMES: Mapping[int, str] = {
    VOCAB_SIZE: "vocab_size decoder_vocab_size n_vocab vocab_size_per_layer_input",
    MAX_LEN: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions "
    "original_max_position_embeddings model_max_length max_source_positions",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff ffn_hidden_size d_inner "
    "dense_intermediate_size shared_intermediate_size intermediate_size_mlp feed_forward_size",
    32: "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim dim_model_base embedding_dim "
    "input_embedding_size output_embedding_size attention_hidden_size lru_width cross_attention_hidden_size",
    24: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size",
    16: "q_lora_rank kv_lora_rank o_lora_rank mamba_chunk_size chunk_size hidden_size_per_layer_input "
    "router_hidden_size laurel_rank adapter_rank query_pre_attn_scalar index_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim v_head_dim head_dim swa_head_dim dim_head d_head attention_head_size "
    "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_headdim mamba_head_dim "
    "mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads n_mamba_heads sliding_window "
    "sliding_window_size attention_window_size window_size local_attention index_topk kv_channels",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "swa_num_attention_heads linear_num_value_heads linear_num_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts time_step_rank mamba_dt_rank index_n_heads rotary_dim num_query_groups",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_key_value_heads "
    "num_kv_heads linear_num_key_heads num_experts_per_tok moe_k moe_topk top_k num_selected_experts "
    "mamba_n_groups n_groups mamba_ngroups swa_num_key_value_heads max_window_layers",
    1: "n_group topk_group num_expert_groups n_shared_experts first_k_dense_replace num_mem_blocks",
}

SIZES: Mapping[str, int] = {name: size for size, names in _NAMES.items() for name in names.split()}
"""A small value of each field that sets a size."""

_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_HYBRID = {"num_hidden_layers": 3, "layer_types": _LINEAR}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
_GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": 48,
    "activation_sparsity_pattern": [0.0] * 4,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
_ASSISTANT = {**_TEXT, **_GEMMA4, "head_dim": 8, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
_LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 8,
    "floor_scale": 8,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
_DECODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl"
)

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"is_decoder": True} for name in _DECODERS.split()},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], "attn_rotary_emb": 4},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB_SIZE, "vocab_size": VOCAB_SIZE},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 16,
        "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "doge": {"sliding_window": None},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {**_GEMMA3N, "num_kv_shared_layers": 0},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_assistant": {"text_config": {**_ASSISTANT, "model_type": "gemma4_text"}},
    "gemma4_unified_assistant": {"text_config": {**_ASSISTANT, "model_type": "gemma4_unified_text"}},
    "got_ocr2": {
        "image_token_index": 3,
        "text_config": {**_TEXT, "model_type": "qwen2", "initializer_range": 0.3},
        "vision_config": {"global_attn_indexes": [1], "image_size": 64, "output_channels": 16, "mlp_dim": 48},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _HYBRID,
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1},
    "kimi_linear": _HYBRID,
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "minimax": {"sliding_window": None},
    "modernbert-decoder": {"sep_token_id": 2, "cls_token_id": 2, "eos_token_id": 2},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "olmo_hybrid": _HYBRID,
    "qwen3_5": {"text_config": _HYBRID},
    "qwen3_5_moe": {"text_config": _HYBRID},
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "phimoe": {"sliding_window": None},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [8, 12],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "roc_bert": {"is_decoder": True, "pronunciation_vocab_size": VOCAB_SIZE, "shape_vocab_size": VOCAB_SIZE},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "time_step_min": 1e-9,  # a floor of transformers' scan of many tokens, which its step of one token lacks
    },
}
"""What a model type needs besides small sizes."""


def architectures() -> dict[str, type[PreTrainedConfig]]:
    """Return the config class of each causal language model of transformers, by model type."""
    by_type = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    return {name: by_type[name] for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name in by_type}


def class_name(model_type: str) -> str:
    """Return the name of the model class of an architecture."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return found if isinstance(found, str) else found[0]


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the config of a tiny model of an architecture."""
    config_class = architectures()[model_type]
    return config_class(**shrunk(config_class, OPTIONS.get(model_type, {})))


def shrunk(config_class: type[PreTrainedConfig], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `config_class` with small sizes, and `options` over them."""
    fields = config_class().to_dict()
    values: dict[str, Any] = {}
    for field, size in SIZES.items():
        name = config_class.attribute_map.get(field, field)
        if name in fields and not isinstance(fields[name], (bool, list, tuple, str)):
            values[name] = size
    if "kv_lora_rank" in fields:  # keys and values of a latent are expanded for every head
        values["num_key_value_heads"] = values["num_attention_heads"]
    if values.get("expand") or {"expand", "num_heads", "head_dim"} <= set(fields):
        values["num_heads"] = 8
    if "initializer_range" in fields:
        values["initializer_range"] = 0.3
    for token, value in (("bos_token_id", 1), ("eos_token_id", None), ("pad_token_id", 0)):
        if token in fields:
            values[token] = value
    for name, part in config_class.sub_configs.items():
        if hasattr(part, "attribute_map") and isinstance(fields.get(name), dict):
            values[name] = shrunk(part, options.get(name, {}))
        elif name in options:  # of a part that is any text model
            values[name] = options[name]
    return {**values, **{k: v for k, v in options.items() if k not in config_class.sub_configs}}


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Return a random float32 model of an architecture, in eval mode, whose logits lie far apart."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() <= 1:  # norm weights are all ones, and biases and sinks zero, at first
            nn.init.normal_(parameter, mean=float(parameter.data.mean()), std=0.2)
        elif float(parameter.data.std()) < 0.1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def save_tiny(model_type: str, model: PreTrainedModel, folder: Path) -> Path:
    """Save a tiny model with the config of its architecture, also where the class is that of a part, such as text."""
    model.save_pretrained(str(folder))
    if model.config.model_type != model_type:
        tiny_config(model_type).save_pretrained(str(folder))
    return folder
