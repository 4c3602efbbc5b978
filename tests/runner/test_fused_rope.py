"""Whole models answer the same with norm and rotary embedding as part of attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph import LLM, SamplingParams
from tests.quick_families import families
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import FAMILIES, WINDOW, make_model, save

PROMPTS = [[5, 17, 3], [9], [7, 7, 90, 23, 41, 2, 64, 118, 30, 55, 81, 12], list(range(20, 20 + 3 * WINDOW))]
PASSES = ("eliminate-noops", "merge-projections", "fuse-add-rms-norm", "fuse-rope-kv-write")

ALIKE = ("llama3-rope", "mistral", "qwen2-sliding", "phi3-longrope-short", "qwen3-moe")
"""Families whose rotary embedding and norms another one of the list has too."""

RUNS = [
    *families((name for name in FAMILIES if name not in ("opt", *ALIKE)), "triton", "eager"),
    ("qwen3", "sdpa", "eager"),
    *families(("phi", "olmo2"), "triton", "eager"),
    pytest.param("qwen3", "triton", "inductor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "backend", "compiler"), RUNS)
def test_family_answers_as_transformers_does(name: str, backend: str, compiler: str, tmp_path: Path) -> None:
    """Greedy, float32, under recorded graphs of every kind; every layer fuses."""
    model = make_model(name)
    prompts = PROMPTS[2:] if name == "phi3-longrope-long" else PROMPTS  # transformers' regime depends on the prompt
    config = {"passes": PASSES, "expect": {"fuse-rope-kv-write": "all"}, "strict": True}
    with LLM(
        save(model, tmp_path), skip_tokenizer_init=True, dtype="float32", compiler=compiler, compile_workers=0,
        attention_backend=backend, compilation_config=config,
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(temperature=0.0, max_tokens=20)
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_tokens_are_the_same_in_every_mode(mode: str, tmp_path: Path) -> None:
    """Graphs are recorded as functions on a CPU: warm-up and capture run the op over the same buffers again."""
    model = make_model("qwen3")
    with LLM(
        save(model, tmp_path), skip_tokenizer_init=True, dtype="float32", compiler="eager", attention_backend="triton",
        graph_kind="recorded", cudagraph_mode=mode, cudagraph_capture_sizes=(1, 2, 4, 8, 64),
        compilation_config={"passes": PASSES},
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(temperature=0.0, max_tokens=12)
        )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("name", ["qwen3", "gpt-neox", "gemma3"])
def test_tokens_are_the_same_on_a_gpu_in_every_mode(name: str, mode: str, tmp_path: Path) -> None:
    """Real graphs, in which rows of prompts are rotated in place, and kernels are patched under PIECEWISE."""
    model = make_model(name)
    with LLM(
        save(model, tmp_path), skip_tokenizer_init=True, dtype="float32", compiler="eager", attention_backend="triton",
        device="cuda", cudagraph_mode=mode, cudagraph_capture_sizes=(1, 2, 4, 8, 64), num_kv_blocks=256,
        compilation_config={"passes": PASSES, "expect": {"fuse-rope-kv-write": "all"}},
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(temperature=0.0, max_tokens=12)
        )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)
