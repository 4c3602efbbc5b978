"""Model families answer as transformers does, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph import LLM, SamplingParams
from tests.quick_families import families
from tests.runner import models_page
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import FAMILIES, UNLISTED, WINDOW, make_model, save

PROMPTS = [[5, 17, 3], [9], [7, 7, 90, 23, 41, 2, 64, 118, 30, 55, 81, 12], list(range(20, 20 + 3 * WINDOW))]
"""Ragged; the last two are longer than the sliding windows and longrope's original length."""

AS_ON_THE_PAGE = {
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "opt": "opt",
    "granite": "granite",
    "olmo2": "olmo2",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "smollm3": "smollm3",
    "deepseek-v3": "deepseek_v3",
    "mixtral": "mixtral",
    "glm4": "glm4",
    "phi": "phi",
    "gpt2": "gpt2",
    "ernie4.5": "ernie4_5",
}
"""Families of which the tests of docs/models.md ask the same, by their model type there."""

RUNS = [
    *families((name for name in (*FAMILIES, *UNLISTED) if name not in AS_ON_THE_PAGE), "eager"),
    ("llama", "inductor"),
    pytest.param("gemma3", "inductor", marks=pytest.mark.slow),
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


def test_the_other_families_are_on_the_page() -> None:
    rows = models_page.rows_of(models_page.PAGE.read_text(encoding="utf-8"))
    assert {rows[name].answer for name in AS_ON_THE_PAGE.values()} == {models_page.RUNS}
    made = {**FAMILIES, **UNLISTED}
    assert all(made[family]().model_type == name for family, name in AS_ON_THE_PAGE.items())
