"""EAGLE-3 heads of random weights, saved as the speculators library saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

NUM_DRAFTS = 3


def drafts_by_head(folder: Path, **options: Any) -> dict[str, Any]:
    """`speculative_config` with the EAGLE-3 head in `folder`."""
    return {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": NUM_DRAFTS,
        "stops_when_slower": False,
        **options,
    }


def eagle3_checkpoint(
    model: PreTrainedModel, *, draft_vocab: int | None = None, kind: str = "llama", seed: int = 0, **written: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config.json and the tensors of a head for `model`; `written` goes into the config.

    A head of the whole vocabulary has neither embedding nor logits of its own.
    """
    target = model.config
    layer: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        **written.pop("layer", {}),
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft_vocab or target.vocab_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTS}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        **written,
    }
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    size, wide, heads = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    states = len(config["eagle_aux_hidden_state_layer_ids"]) * (config.get("target_hidden_size") or size)
    tensors = {"fc.weight": rand(size, states), "norm.weight": torch.ones(size)}
    for place in range(layer["num_hidden_layers"]):
        name, read = f"layers.{place}", size if place else 2 * size
        for part, count in (("q", 4), ("k", 2), ("v", 2)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = rand(count * heads, read)
        tensors[f"{name}.self_attn.o_proj.weight"] = rand(size, 4 * heads)
        tensors |= {f"{name}.mlp.{part}_proj.weight": rand(wide, size) for part in ("gate", "up")}
        tensors[f"{name}.mlp.down_proj.weight"] = rand(size, wide)
        for norm in ("input_layernorm", "post_attention_layernorm", *(() if place else ("hidden_norm",))):
            tensors[f"{name}.{norm}.weight"] = torch.ones(size)
        if kind == "qwen3":
            tensors |= {f"{name}.self_attn.{part}_norm.weight": torch.ones(heads) for part in ("q", "k")}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.ones(states)
    if config.get("fc_norm"):
        each = states // len(config["eagle_aux_hidden_state_layer_ids"])
        for place in range(len(config["eagle_aux_hidden_state_layer_ids"])):
            tensors[f"fc_norm.{place}.weight"] = torch.ones(each)
    if draft_vocab is not None:
        tensors["lm_head.weight"] = rand(draft_vocab, size)
        tensors["embed_tokens.weight"] = rand(target.vocab_size, size)
        ids = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return config, tensors


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write the two files of a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))
    return folder


def save_small_head(model: PreTrainedModel, folder: Path, tokens: list[int]) -> Path:
    """Save a head that drafts no other than `tokens` of the model's, with an embedding of its own."""
    config, tensors = eagle3_checkpoint(model, draft_vocab=len(tokens), norm_before_residual=True)
    tensors["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
    return save_head(folder, config, tensors)


def save_eagle3(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save a head of random weights for `model`; `options` are those of `eagle3_checkpoint`."""
    return save_head(folder, *eagle3_checkpoint(model, **options))
