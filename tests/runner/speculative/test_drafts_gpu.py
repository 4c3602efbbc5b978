"""Drafts over CUDA graphs, by each method: a verification is a FULL graph, what drafts after it is another, no step
waits for the device, and greedy tokens are those without drafts, but for pairs that nearly tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, RequestOutput, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.tools.bench.speculative import count_ties
from tests.runner.no_sync import run_mixed_requests
from tests.runner.speculative.draft_models import drafts_by, save_first_layers
from tests.runner.speculative.drafting_llm import FEW, NGRAM, NUM_DRAFTS, SIZES
from tests.runner.speculative.heads.random_heads import drafts_by_head, save_small_head
from tests.runner.speculative.heads.test_mtp import MTP, save_with_mtp
from tests.runner.test_graphs import load
from tests.runner.test_step_budget import named, profiled_steps

pytestmark = pytest.mark.gpu

FULL = CUDAGraphMode.FULL
NOISE = 1e-3
"""The difference of two log probabilities up to which two tokens nearly tie, in float32."""
METHODS = ("ngram", "draft_model", "eagle3", "mtp")
PROMPTS = ([5, 6, 7, 8] * 5, [9], [40, 41, 42] * 8, list(range(50, 71)), [40, 42] * 3, list(range(50, 74)))
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1, "allowed_token_ids": FEW},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 3, "allowed_token_ids": FEW},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"temperature": 0.7, "min_tokens": 4, "stop_token_ids": [3], "logit_bias": {5: 2.0}},
    {"temperature": 0.7, "allowed_token_ids": FEW, "n": 2, "extra_args": {"num_speculative_tokens": 1}},
)


@dataclass(frozen=True)
class Drafting:
    """A model, and how it is drafted for."""

    method: str
    folder: Path
    config: dict[str, Any]

    def load(self, **options: Any) -> LLM:
        return load(self.folder, **{**SIZES, "device": "cuda", **options})

    def load_drafting(self, **options: Any) -> LLM:
        return self.load(speculative_config=self.config, **options)


@pytest.fixture(scope="module", params=METHODS)
def drafting(
    request: pytest.FixtureRequest, llama_dir: Path, llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Drafting:
    method, folder = request.param, tmp_path_factory.mktemp("draft")
    if method == "ngram":
        return Drafting(method, llama_dir, NGRAM)
    if method == "draft_model":
        return Drafting(method, llama_dir, drafts_by(save_first_layers(llama, 1, folder, llama_dir)))
    if method == "eagle3":
        return Drafting(method, llama_dir, drafts_by_head(save_small_head(llama, folder, FEW)))
    save_with_mtp("GLM-4.5", folder)
    return Drafting(method, folder, MTP)


def greedy(llm: LLM) -> Sequence[RequestOutput]:
    """In chunks, with and without a cached prefix, from few tokens, so that drafts are often right."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=FEW, logprobs=-1)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": False}, {}, {"compiler": "inductor"}, {"cudagraph_mode": "PIECEWISE"}],
    ids=["awaited", "ahead", "inductor", "piecewise"],
)
def test_greedy_answers_are_those_without_drafts(drafting: Drafting, options: dict[str, Any]) -> None:
    """Verifications run FULL where that is the mode, and every draft after them is a replay."""
    options = {"max_logprobs": -1, "num_kv_blocks": 64, "async_scheduling": True, **options}
    with drafting.load(**options) as llm:
        expected = greedy(llm)
    with drafting.load_drafting(**options) as llm:
        found = greedy(llm), greedy(llm)
        stats, by_mode = llm.engine.stats, llm.runner.counters.by_mode()
        drafter = getattr(llm.runner, "drafter", None)
        assert drafter is None or not drafter.failed
        if "cudagraph_mode" not in options:
            assert drafter is None or (drafter.num_replays > 0 and drafter.num_uncaptured == 0)
            assert by_mode[FULL] > 0 and not llm.runner.graphs.failed()
    assert sum(count_ties(one, expected, NOISE) for one in found) <= 1
    assert stats.speculation is not None and stats.num_free_blocks == stats.num_blocks
    assert stats.speculation.num_wasted_tokens > 0
    assert stats.speculation.num_accepted_tokens > 0 or drafting.method in ("draft_model", "mtp"), "they know no option"


STEADY_STEPS = 6


def test_a_verification_is_one_graph_and_its_drafts_another(drafting: Drafting) -> None:
    """No kernel is launched beside them, nothing is copied to the device, and one copy of tokens to the host."""
    options = {"block_size": 64, "max_model_len": 96, "async_scheduling": True}
    with drafting.load_drafting(**options) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
        for i in range(2):
            engine.add_request(str(i), [4 + i, 9, 17], params, is_final_only=True)
        for _ in range(4):
            engine.step()
        events = profiled_steps(engine, STEADY_STEPS)
        assert max(request.num_tokens for request in engine.requests.values()) < 60, "no block was added"
        num_graphs = 1 if drafting.method == "ngram" else 2
        assert named(events, "cudaGraphLaunch", "cuGraphLaunch") == num_graphs * STEADY_STEPS, events
        assert named(events, "cudaLaunchKernel", "cuLaunchKernel") == 0, events
        assert named(events, "Memcpy HtoD") == 0, events
        assert named(events, "Memcpy DtoH") <= STEADY_STEPS, events
        assert llm.runner.counters.by_mode()[FULL] >= STEADY_STEPS


def test_no_step_waits_for_the_device(drafting: Drafting) -> None:
    """With every option, chunks, preemptions, an abort and arrivals in the middle, a step ahead."""
    with drafting.load_drafting(num_kv_blocks=24, async_scheduling=True) as llm:
        engine = llm.engine
        run_mixed_requests(engine, OPTIONS, prompt_step=4)
        stats = engine.stats
        assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
        assert stats.speculation is not None and stats.speculation.num_draft_tokens > 10 * NUM_DRAFTS
