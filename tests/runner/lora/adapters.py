"""Adapters that peft writes for the tests: random ones, far enough from nothing that every token depends on them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig
from transformers import PreTrainedModel

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(model: PreTrainedModel, folder: Path, seed: int, **options: Any) -> PreTrainedModel:
    """Write a random adapter for `model`, which stays as it is, and return a copy of the model with it merged."""
    config = LoraConfig(**{"r": 4, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", **options})
    adapted: Any = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the weights of embeddings are saved, too
        adapted.save_pretrained(str(folder))
        merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.eval()
