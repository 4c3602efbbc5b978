"""Support of longrope, rotary embeddings whose frequencies depend on the length of the text."""

from __future__ import annotations

import torch
from torch import nn


def fix_longrope(model: nn.Module, max_model_len: int) -> list[str]:
    """Choose longrope's factors once, from `max_model_len`, and return a note for each choice.

    transformers chooses short or long factors in every forward pass by its largest position, a data-dependent branch
    that cannot be traced (and that invalidates cached keys). Here a model whose texts may exceed its original length
    always uses the long factors, any other model the short ones. Mutates the rotary modules of `model`.
    """
    notes: list[str] = []
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if rope_type == "longrope":
            notes.append(_fix(module, max_model_len, layer_type=None))
            module.rope_type = "default"  # type: ignore[assignment]  # no update in forward
        elif isinstance(rope_type, dict) and "longrope" in rope_type.values():
            for layer_type in [key for key, kind in rope_type.items() if kind == "longrope"]:
                notes.append(_fix(module, max_model_len, layer_type=layer_type))
            module.rope_type = {  # type: ignore[assignment]
                key: "default" if kind == "longrope" else kind for key, kind in rope_type.items()
            }
    return list(dict.fromkeys(notes))


def _fix(module: nn.Module, max_model_len: int, layer_type: str | None) -> str:
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = module.config
    assert isinstance(config, PreTrainedConfig), type(config)
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    prefix = "" if layer_type is None else f"{layer_type}_"
    original_len = int(parameters["original_max_position_embeddings"])
    is_long = max_model_len > original_len
    inv_freq = getattr(module, f"{prefix}original_inv_freq")
    assert isinstance(inv_freq, torch.Tensor), type(inv_freq)
    if is_long:
        inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](
            config, inv_freq.device, seq_len=original_len + 1, layer_type=layer_type
        )
    device = getattr(module, f"{prefix}inv_freq").device
    module.register_buffer(f"{prefix}inv_freq", inv_freq.to(device), persistent=False)
    regime, relation = ("long", "above") if is_long else ("short", "within")
    return f"longrope: {regime} factors, as max_model_len={max_model_len} is {relation} the original {original_len}"
