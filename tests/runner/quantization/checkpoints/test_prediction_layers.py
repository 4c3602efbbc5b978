"""Quantised layers for multi-token prediction, behind a model's own, are left out of the model, scales and all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecegraph.errors import ConfigError
from tests.runner.quantization.checkpoints.written import FORMATS, Tensors, change_config, change_tensors, fp8_channels
from tests.runner.quantization.test_llm_quantised import load
from tests.runner.speculative.heads.test_mtp import MTP, save_with_mtp

LAYER = "model.layers.2."
PROMPT = {"prompt_token_ids": [5, 9, 2, 77, 31, 8]}


def write(folder: Path) -> None:
    """Write a mixture with such a layer, its linears in e4m3, and scales of cached keys and values."""
    save_with_mtp("GLM-4.5", folder)

    def quantise(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight") and "eh_proj" not in name]:
            stored, _ = fp8_channels(tensors.pop(name).float())
            path = name.removesuffix(".weight")
            tensors.update({f"{path}.{suffix}": tensor for suffix, tensor in stored.items()})
        for layer in range(3):
            tensors |= {f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor(0.5) for part in "kv"}

    change_tensors(folder, quantise)
    config, _, _ = FORMATS["FP8_DYNAMIC"]
    config = {**config, "ignore": ["lm_head", "re:.*eh_proj", "re:.*gate$"]}
    change_config(folder, lambda written: written.update(quantization_config=config))


def test_answers_are_those_of_the_files_without_the_layer(tmp_path: Path) -> None:
    """The scales of its cached keys and values are left out, too; drafts are refused with quantised weights."""
    write(tmp_path)
    options = {"quantization": None, "dtype": "float32", "enforce_eager": True, "kv_cache_dtype": "fp8"}
    with pytest.raises(ConfigError, match="speculative_config is not yet available with a quantised checkpoint"):
        load(tmp_path, **options, speculative_config=MTP)
    answers = []
    for _ in range(2):
        with load(tmp_path, **options) as llm:
            (output,) = llm.generate(PROMPT, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
            assert any("layers of experts are fp8-tokens" in note for note in llm.notes)
        change_tensors(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if LAYER in name])
    assert answers[0] == answers[1]
