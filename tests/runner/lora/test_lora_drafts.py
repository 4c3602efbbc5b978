"""Adapters with drafts: looked up in the prompt, or made by a draft model without adapters; tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from tests.runner.lora.test_llm_lora import Family
from tests.runner.margin_rule import assert_same_tokens

REPEATING = [5, 9, 2, 77, 31, 8] * 3
PROMPTS = [[*REPEATING, number] for number in (5, 9, 2)] + [[64], list(range(3, 40))]
ADAPTERS = [0, 6, None, 3, 1]
"""The second changes the embedding and the output layer, whose rows of logits are those of drafts, too."""

GRAPHS: dict[str, Any] = {
    "graph_kind": "recorded", "attention_backend": "triton", "cudagraph_capture_sizes": [4, 8, 16, 32]
}  # fmt: skip


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("adapters"))


def drafting(family: Family, method: str) -> dict[str, Any]:
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "stops_when_slower": False}
    if method == "draft_model":
        return {"speculative_config": {**options, "model": str(family.base)}}
    return {"speculative_config": {**options, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["no graphs", "graphs"])
def test_tokens_are_those_of_the_merged_models(family: Family, method: str, graphs: dict[str, Any]) -> None:
    """In a batch of several adapters and none, and for a request with none alone; drafts are accepted."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with family.load(max_loras=4, max_num_seqs=8, **drafting(family, method), **graphs) as llm:
        check(family, llm, params, ADAPTERS)
        check(family, llm, params, [None] * len(PROMPTS))
        stats = llm.engine.scheduler.stats.speculation
        assert stats is not None and stats.num_accepted_tokens > 0
        if graphs:
            assert llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0


def check(family: Family, llm: LLM, params: SamplingParams, adapters: list[int | None]) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    loras = [None if number is None else family.requests[number] for number in adapters]
    for prompt, number, output in zip(
        PROMPTS, adapters, llm.generate(prompts, params, lora_request=loras, use_tqdm=False), strict=True
    ):
        model = family.model if number is None else family.merged[number]
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


def test_heads_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="a method other than 'ngram' and 'draft_model' is not yet available with en"):
        EngineConfig(
            source=ModelSource(model="x"),
            enable_lora=True,
            speculative=SpeculativeConfig(method="mtp", num_speculative_tokens=1),
        )
