"""Model families answer as transformers does, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph import LLM, SamplingParams
from tests.quick_families import families
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import FAMILIES, UNLISTED, WINDOW, make_model, save

PROMPTS = [[5, 17, 3], [9], [7, 7, 90, 23, 41, 2, 64, 118, 30, 55, 81, 12], list(range(20, 20 + 3 * WINDOW))]
"""Ragged; the last two are longer than the sliding windows and longrope's original length."""

RUNS = [
    *families((*FAMILIES, *UNLISTED), "eager"),
    *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("llama", "gemma3")),
]


@pytest.mark.parametrize(("name", "compiler"), RUNS)
def test_family_answers_as_transformers_does(name: str, compiler: str, tmp_path: Path) -> None:
    """Greedy, float32, a ragged batch at once against each prompt alone."""
    model = make_model(name)
    prompts = PROMPTS[2:] if name == "phi3-longrope-long" else PROMPTS  # transformers' regime depends on the prompt
    folder = save(model, tmp_path)
    with LLM(folder, skip_tokenizer_init=True, dtype="float32", compiler=compiler, compile_workers=0) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(temperature=0.0, max_tokens=20)
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)
