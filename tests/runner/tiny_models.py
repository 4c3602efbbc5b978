"""Small random decoders of many families, made from configs only: nothing here names one of our code paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 128
WINDOW = 8
MAX_LEN = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,  # wide: narrow random weights give logits that nearly tie
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _longrope(original: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": MAX_LEN,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": original,
        },
    }


def make_config(name: str, **options: Any) -> PreTrainedConfig:
    """transformers' config class `name`, small, with `options` over the common ones."""
    config: PreTrainedConfig = getattr(transformers, name)(**{**_COMMON, **options})
    return config


def _config(name: str, **options: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: make_config(name, **options)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config("LlamaConfig"),
    "llama3-rope": _config(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    ),
    "llama-yarn": _config(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    ),
    "mistral": _config("MistralConfig", sliding_window=WINDOW),
    "qwen2": _config("Qwen2Config"),
    "qwen2-sliding": _config(
        "Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, layer_types=_MIXED
    ),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "gemma2": _config(
        "Gemma2Config", head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, attn_logit_softcapping=5.0
    ),
    "gemma3": _config(
        "Gemma3TextConfig",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        num_hidden_layers=3,
        layer_types=[*_MIXED, "sliding_attention"],
    ),
    "phi3": _config("Phi3Config"),
    "phi3-longrope-short": _config("Phi3Config", **_longrope(MAX_LEN)),
    "phi3-longrope-long": _config("Phi3Config", **_longrope(8)),
    "gpt-neox": _config("GPTNeoXConfig"),
    "opt": _config("OPTConfig", ffn_dim=48, init_std=0.3, word_embed_proj_dim=32),
    "qwen3-moe": _config("Qwen3MoeConfig", head_dim=16, **_MOE),
}
"""The families the project promises."""

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_SHARED_MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
}

UNLISTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt-oss": _config("GptOssConfig", head_dim=16, sliding_window=WINDOW, num_local_experts=4, layer_types=_MIXED),
    "granite": _config("GraniteConfig", attention_multiplier=0.2, logits_scaling=2.0, residual_multiplier=0.5),
    "olmo2": _config("Olmo2Config"),
    "cohere": _config("CohereConfig", logit_scale=0.25),
    "cohere2": _config("Cohere2Config", sliding_window=WINDOW, layer_types=_MIXED),
    "starcoder2": _config("Starcoder2Config", sliding_window=WINDOW),
    "smollm3": _config("SmolLM3Config", no_rope_layers=[1, 0]),
    "deepseek-v3": _config("DeepseekV3Config", first_k_dense_replace=1, **_LATENT, **_SHARED_MOE),
    "mixtral": _config("MixtralConfig", num_local_experts=4, sliding_window=None),
    "glm4": _config("Glm4Config", head_dim=8),
    "phi": _config("PhiConfig"),
    "gpt2": _config("GPT2Config"),
    "ernie4.5": _config("Ernie4_5Config", head_dim=8),
}
"""Families nobody promised: they run because nothing here knows families by name."""


LATENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek-v2": _config(
        "DeepseekV2Config", first_k_dense_replace=1, **{**_LATENT, "q_lora_rank": None}, **_SHARED_MOE
    ),
    "deepseek-v3": UNLISTED["deepseek-v3"],
    "glm4-moe-lite": _config("Glm4MoeLiteConfig", mlp_layer_types=["dense", "sparse"], **_LATENT, **_SHARED_MOE),
    "youtu": _config("YoutuConfig", **_LATENT),
    "minicpm3": _config("MiniCPM3Config", **_LATENT),
    "axk1": _config("AXK1Config", first_k_dense_replace=1, **_LATENT, **_SHARED_MOE),
}
"""Models with latent attention; Kimi-Linear is one of the hybrids."""


CHUNKED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama4": _config(
        "Llama4TextConfig",
        head_dim=8,
        num_hidden_layers=4,
        intermediate_size_mlp=48,
        interleave_moe_layer_step=2,
        num_local_experts=4,
        attention_chunk_size=WINDOW,
        floor_scale=6,
        attn_scale=2.0,
    ),
    "llama4-tokens": _config(  # no layer without rotary embedding, one that sees all, and no norm of heads
        "Llama4TextConfig",
        head_dim=8,
        num_hidden_layers=3,
        intermediate_size_mlp=48,
        moe_layers=[],
        no_rope_layers=[1, 1, 1],
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        attention_chunk_size=6,
        use_qk_norm=False,
    ),
}
"""Models whose layers attend within chunks: every fourth layer of the first sees all, without rotary embedding."""


_GATED_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]

HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3.5": _config("Qwen3_5TextConfig", num_hidden_layers=3, layer_types=_LINEAR, **_GATED_DELTA),
    "lfm2": _config("Lfm2Config", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    "bamba": _config("BambaConfig", num_hidden_layers=3, attn_layer_indices=[1], attn_rotary_emb=4, **_MAMBA2),
    "jamba": _config(
        "JambaConfig",
        num_hidden_layers=3,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "qwen3.5-moe": _config(
        "Qwen3_5MoeTextConfig",
        num_hidden_layers=3,
        layer_types=_LINEAR,
        shared_expert_intermediate_size=24,
        **_MOE,
        **_GATED_DELTA,
    ),
    "qwen3-next": _config(
        "Qwen3NextConfig",
        num_hidden_layers=3,
        layer_types=_LINEAR,
        shared_expert_intermediate_size=24,
        **_MOE,
        **_GATED_DELTA,
    ),
    "olmo-hybrid": _config("OlmoHybridConfig", num_hidden_layers=3, layer_types=_LINEAR, **_GATED_DELTA),
    "lfm2-moe": _config(
        "Lfm2MoeConfig", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, **_MOE
    ),
    "granite4-hybrid": _config(
        "GraniteMoeHybridConfig",
        num_hidden_layers=3,
        layer_types=_LINEAR,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        attention_multiplier=0.2,
        **_MAMBA2,
    ),
    "falcon-h1": _config("FalconH1Config", head_dim=16, mamba_d_ssm=64, **_MAMBA2),
    "falcon-h1-norm": _config("FalconH1Config", head_dim=16, mamba_d_ssm=64, mamba_rms_norm=True, **_MAMBA2),
    "zamba2": _config(
        "Zamba2Config",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=2,
        mamba_d_state=8,
        num_mem_blocks=1,
        time_step_min=1e-9,  # a floor of transformers' scan of many tokens, which its step of one token lacks
    ),
    "nemotron-h": _config(
        "NemotronHConfig",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        n_group=1,
        topk_group=1,
    ),
    "kimi-linear": _config(
        "KimiLinearConfig",
        num_hidden_layers=3,
        layer_types=_LINEAR,
        linear_num_heads=4,
        linear_head_dim=8,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_layer_types=["dense", "sparse", "dense"],
        n_group=1,
        topk_group=1,
    ),
    "minimax": _config(
        "MiniMaxConfig",
        num_hidden_layers=3,
        layer_types=_LINEAR,
        head_dim=8,
        block_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "mamba2": _config(
        "Mamba2Config", num_heads=8, head_dim=8, n_groups=2, state_size=8, chunk_size=16, time_step_limit=(0.0, 100.0)
    ),
    "mamba": _config("MambaConfig", state_size=8),
    "falcon-mamba": _config("FalconMambaConfig", state_size=8),
}
"""Models in which some layers keep a state instead of keys and values, the first four one of each kind."""


def llama_config(**options: Any) -> PreTrainedConfig:
    return make_config("LlamaConfig", **options)


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random float32 model of family `name`, in eval mode."""
    return random_model({**FAMILIES, **UNLISTED, **LATENT, **CHUNKED, **HYBRIDS}[name](), seed)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # norm weights are all ones, and biases and sinks zero, at first
        if parameter.dim() <= 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.data.mean()), std=0.2)
    model.eval()
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(str(folder))
    return folder
