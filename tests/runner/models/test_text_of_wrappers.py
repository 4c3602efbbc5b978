"""The text model in a checkpoint of several modalities runs on text: its weights have the wrapper's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import CheckpointError
from tests.runner.architectures import OPTIONS, shrunk
from tests.runner.margin_rule import generate_alone

PROMPTS = [[5, 17, 3, 44, 9, 31, 8, 2, 77], [9]]
SLOW = ("gemma3", "llama4", "mllama")
WRAPPERS = ["qwen3_5", *[pytest.param(name, marks=pytest.mark.slow) for name in SLOW]]


def saved(name: str, folder: Path) -> PreTrainedModel:
    """A tiny random wrapper, its towers for images included, as its class saves it."""
    config_class = CONFIG_MAPPING[name]
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config_class(**shrunk(config_class, OPTIONS.get(name, {}))), dtype=torch.float32
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.data.mean()) if parameter.dim() < 2 else 0.0, std=0.3)
    model.save_pretrained(str(folder))
    return model.eval()


def load(folder: Path) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        compiler="eager",
        compile_workers=0,
        skip_tokenizer_init=True,
        block_size=4,
        max_model_len=40,
        max_num_batched_tokens=5,
        max_num_seqs=4,
    )


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_is_answered_as_by_the_wrapper(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with load(tmp_path) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [generate_alone(model, prompt, 8) for prompt in PROMPTS]


def test_weights_that_are_no_tower_are_refused(tmp_path: Path) -> None:
    """Only what lies beside the text model's modules is left unread."""
    saved("llama4", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    assert any(name.startswith("vision_model.") for name in weights)
    save_file({**weights, "language_model.model.layers.9.extra": torch.zeros(1)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 unexpected: .*layers\.9\.extra\."):
        load(tmp_path)
