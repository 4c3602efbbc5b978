"""Draft models made from another model: itself, and its first half."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

NUM_DRAFTS = 3
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def drafts_by(folder: Path, **options: Any) -> dict[str, Any]:
    """`speculative_config` with the model in `folder` as the draft."""
    return {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": NUM_DRAFTS,
        "stops_when_slower": False,
        **options,
    }


def save_first_layers(model: PreTrainedModel, num_layers: int, folder: Path, tokenizer: Path | None = None) -> Path:
    """Save a copy with the first layers alone, and the tokenizer that lies in the folder `tokenizer`."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    half: Any = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    wanted = half.state_dict()
    half.load_state_dict({name: value for name, value in model.state_dict().items() if name in wanted})
    half.save_pretrained(str(folder))
    for name in TOKENIZER_FILES if tokenizer is not None else ():
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    return folder
