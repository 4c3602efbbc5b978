"""Answers with drafts are those without: greedy or sampled, in every mode, with every option, whoever waits or goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM, RequestOutput, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError, RequestError
from piecegraph.runner.sampling.batch_sampler import Sampler, SamplerOutput
from piecegraph.runner.startup.compiling.profile import run_largest_step
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.speculative.drafting_llm import FEW, NUM_DRAFTS, PROMPTS, SIZES, answers, assert_same, drafting
from tests.runner.test_graphs import load

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@pytest.fixture(scope="module")
def expected(llama_dir: Path) -> list[RequestOutput]:
    with load(llama_dir, **SIZES) as llm:
        assert llm.engine.stats.speculation is None
        return answers(llm)


@pytest.fixture(scope="module", params=[False, True], ids=["each step awaited", "a step ahead"])
def llm(request: pytest.FixtureRequest, llama_dir: Path) -> Iterator[LLM]:
    with drafting(llama_dir, async_scheduling=request.param) as llm:
        yield llm
        stats = llm.engine.stats
        assert stats.num_free_blocks == stats.num_blocks, "blocks leaked"


@pytest.mark.parametrize("at_most", [FULL, PIECEWISE, NONE], ids=lambda mode: mode.value)
def test_answers_are_those_without_drafts(llm: LLM, expected: list[RequestOutput], at_most: CUDAGraphMode) -> None:
    """Chunks of prompts, priorities, a cached prefix, n, stops, log probabilities and requests that draft less."""
    runner, execute = llm.runner, llm.runner.execute_model
    before = llm.engine.stats.speculation
    assert before is not None
    try:
        runner.execute_model = lambda output: execute(output, at_most=at_most)  # type: ignore[method-assign, misc, assignment]
        assert_same(answers(llm), expected)
    finally:
        runner.execute_model = execute  # type: ignore[method-assign]
    stats = llm.engine.stats.speculation
    assert stats is not None
    accepted = stats.num_accepted_tokens - before.num_accepted_tokens
    assert accepted > 10, stats
    assert stats.num_draft_tokens - before.num_draft_tokens > accepted
    assert runner.counters.by_mode()[at_most] > 0


def test_uniform_verifications_run_under_one_graph(llm: LLM) -> None:
    """A batch whose requests all verify the captured number of drafts has a FULL graph of its own."""
    count = 1 + NUM_DRAFTS
    graphs = [one for one in llm.runner.graphs.descriptors(FULL) if one.uniform_token_count == count]
    assert sorted((one.num_reqs or 0, one.num_tokens) for one in graphs) == [(n, n * count) for n in (1, 2, 4, 6)]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, allowed_token_ids=[40])
    llm.generate([{"prompt_token_ids": [40] * 8}], params, use_tqdm=False)
    ran = {(row.mode, row.num_tokens) for row in llm.runner.counters.rows()}
    assert any((FULL, one.num_tokens) in ran for one in graphs)


def test_answers_by_torchs_attention_are_the_same(llama_dir: Path, expected: list[RequestOutput]) -> None:
    """As on a CPU by default: no graphs, and lengths that are planned on the host."""
    with drafting(llama_dir, attention_backend="sdpa", graph_kind="auto") as llm:
        assert_same(answers(llm), expected)
        stats = llm.engine.stats.speculation
        assert stats is not None and stats.num_accepted_tokens > 10


@pytest.mark.parametrize("is_ahead", [False, True], ids=["each step awaited", "a step ahead"])
def test_requests_that_give_way_answer_the_same(llama_dir: Path, expected: list[RequestOutput], is_ahead: bool) -> None:
    """Nine blocks for six requests: drafts wait for blocks, and requests are preempted."""
    with drafting(llama_dir, num_kv_blocks=9, max_model_len=32, async_scheduling=is_ahead) as llm:
        assert_same(answers(llm), expected)
        stats = llm.engine.stats
        assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
        assert stats.speculation is not None and stats.speculation.num_accepted_tokens > 10


def test_a_text_ends_at_the_longest_length(llm: LLM) -> None:
    """No draft goes behind it, and a text that ends there by itself is as long as without drafts."""
    for max_tokens in (None, 7):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, allowed_token_ids=[40])
        (output,) = llm.generate([{"prompt_token_ids": [40] * 30}], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert list(output.outputs[0].token_ids) == [40] * (34 if max_tokens is None else 7)


def test_all_of_a_certain_text_is_accepted(llm: LLM) -> None:
    """One token is allowed: each verification gives all it can."""
    before = llm.engine.stats.speculation
    assert before is not None
    params = SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True, allowed_token_ids=[40])
    llm.generate([{"prompt_token_ids": [40] * 8}], params, use_tqdm=False)
    after = llm.engine.stats.speculation
    assert after is not None
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert drafted == after.num_accepted_tokens - before.num_accepted_tokens >= 15


def test_metrics_have_vllms_names(llm: LLM) -> None:
    answers(llm)
    found = {metric.name: metric for metric in llm.get_metrics()}
    stats = llm.engine.stats.speculation
    assert stats is not None
    by_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values  # type: ignore[attr-defined]
    assert by_position == list(stats.num_accepted_by_position) and len(by_position) == NUM_DRAFTS
    assert by_position[0] >= by_position[1] >= by_position[2] > 0
    assert sum(by_position) == found["vllm:spec_decode_num_accepted_tokens"].value == stats.num_accepted_tokens  # type: ignore[attr-defined]
    assert found["vllm:spec_decode_num_draft_tokens"].value == stats.num_draft_tokens  # type: ignore[attr-defined]
    assert found["vllm:spec_decode_num_drafts"].value == stats.num_verifications  # type: ignore[attr-defined]


@pytest.mark.parametrize("asked", [-1, NUM_DRAFTS + 1, True, "2"])
def test_a_request_for_more_drafts_than_there_are_is_refused(llm: LLM, asked: object) -> None:
    params = SamplingParams(extra_args={"num_speculative_tokens": asked})
    with pytest.raises(RequestError, match="from 0 .no drafts. to 3"):
        llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)


@torch.no_grad()
def test_the_largest_step_has_a_row_for_every_draft(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on a GPU measures it, with more rows of logits than there are requests; it leaves no trace."""
    rows_sampled = []

    def sample(self: Sampler, logits: torch.Tensor, **options: Any) -> SamplerOutput:
        rows_sampled.append(len(logits))
        return original(self, logits, **options)

    original = Sampler.sample
    before = answers(llm)
    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "sample", sample)
        run_largest_step(
            llm.runner.step,
            num_tokens=SIZES["max_num_batched_tokens"],
            max_model_len=llm.max_model_len,
            needs_host_batch=llm.runner._needs_host_batch,
        )
    assert rows_sampled == [SIZES["max_num_seqs"] * (1 + NUM_DRAFTS)]
    assert_same(answers(llm), before)


def test_a_request_that_is_aborted_gives_all_back(llm: LLM) -> None:
    engine = llm.engine
    for name in ("kept", "aborted"):
        engine.add_request(name, [40, 41] * 4, PROMPTS["logged"][1])
    for _ in range(3):
        engine.step()
    output = engine.abort("aborted")
    assert output is not None and output.outputs[0].finish_reason == "abort"
    assert set(output.outputs[0].token_ids) <= set(FEW)
    while engine.has_unfinished:
        engine.step()
    engine.step()
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


def test_streamed_text_ends_at_a_stop_string(llama_dir: Path) -> None:
    """In the middle of what a step gave: text, tokens and log probabilities behind it are dropped."""
    text = str(byte_tokenizer().decode([40]))
    params = SamplingParams(temperature=0.0, max_tokens=20, allowed_token_ids=[40], stop=[3 * text], logprobs=0)
    with drafting(llama_dir, skip_tokenizer_init=False) as llm:
        *_, last = llm.stream([{"prompt_token_ids": [40] * 6}], params)
        (found,) = last.outputs
        stats = llm.engine.stats.speculation
    assert (found.text, list(found.token_ids), found.stop_reason) == ("", [40] * 3, 3 * text)
    assert found.logprobs is not None and len(found.logprobs) == 3
    assert stats is not None and stats.num_accepted_tokens == 3, "one token of a prompt's step, and four of the next"


def test_steps_ahead_need_attention_that_plans_on_the_device(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="'sdpa' plans with these lengths"):
        drafting(llama_dir, attention_backend="sdpa", graph_kind="auto", async_scheduling=True)
