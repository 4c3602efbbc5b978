"""A prefix that many prompts share is computed once, changes no token, and is shared with nobody else's salt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from tests.runner.margin_rule import assert_same_tokens

PREFIX = [2 + 7 * i % 250 for i in range(64)]
PROMPTS = [[*PREFIX, 50 + i, 60 + i, 70 + i] for i in range(16)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Counted:
    """An LLM, and how many tokens its steps have computed."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm = llm
        self.num_tokens = 0
        schedule = llm.engine.scheduler.schedule

        def counting() -> SchedulerOutput:
            output = schedule()
            self.num_tokens += sum(item.num_tokens for item in output.scheduled)
            return output

        monkeypatch.setattr(llm.engine.scheduler, "schedule", counting)

    def generate(self, prompts: list[list[int]], salt: str = "") -> tuple[list[RequestOutput], int]:
        """The outputs, and the tokens that were computed for them."""
        before = self.num_tokens
        outputs = self.llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts], GREEDY)
        return outputs, self.num_tokens - before


@pytest.fixture(params=[False, True], ids=["in-step", "ahead"])
def counted(
    llama_dir: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int
) -> Iterator[Counted]:
    with LLM(
        llama_dir,
        dtype="float32",
        compiler="eager",
        max_num_seqs=16,
        num_kv_blocks=160,
        async_scheduling=request.param,
        max_num_batched_tokens=max_num_batched_tokens,
    ) as llm:
        yield Counted(llm, monkeypatch)


@pytest.fixture(params=[2048, 24], ids=["whole", "chunked"])
def max_num_batched_tokens(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def test_a_shared_prefix_costs_one_prefill(counted: Counted, llama: PreTrainedModel) -> None:
    """16 prompts that arrive together, and one more later, share the prefix, whether or not a step holds all of it."""
    tails, decodes = sum(len(prompt) - 64 for prompt in PROMPTS), 3 * len(PROMPTS)
    outputs, num_tokens = counted.generate(PROMPTS)
    assert num_tokens == 64 + tails + decodes
    stats = counted.llm.engine.stats
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (16 * 67, 15 * 64)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_tokens(llama, prompt, output.outputs[0].token_ids)
    (again,), num_tokens = counted.generate([PROMPTS[3]])
    assert num_tokens == 3 + 3
    assert_same_tokens(llama, PROMPTS[3], again.outputs[0].token_ids)
    assert counted.llm.engine.stats.num_free_blocks == 160


def test_completions_of_one_prompt_share_it(counted: Counted) -> None:
    """`n` completions cost one prefill and, each, the token that every request must compute itself."""
    before = counted.num_tokens
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=3, ignore_eos=True)
    counted.llm.generate({"prompt_token_ids": [*PREFIX, 9]}, params)
    assert counted.num_tokens - before == 64 + 4 * (1 + 2)


def test_different_salts_share_no_prefix(counted: Counted) -> None:
    """A prompt's answer takes as long as if nobody had asked it before, for all but who has the same salt."""
    whole = 67 + 3
    (first,), num_tokens = counted.generate(PROMPTS[:1])
    assert num_tokens == whole
    for salt, expected in (("a", whole), ("b", whole), ("a", whole - 64)):
        (output,), num_tokens = counted.generate(PROMPTS[:1], salt)
        assert (output.outputs, num_tokens) == (first.outputs, expected)


def test_without_the_cache_every_prompt_is_computed(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(
        llama_dir,
        dtype="float32",
        compiler="eager",
        max_num_seqs=16,
        num_kv_blocks=160,
        enable_prefix_caching=False,
    ) as llm:
        counted = Counted(llm, monkeypatch)
        _, num_tokens = counted.generate(PROMPTS)
        assert num_tokens == 16 * (67 + 3)
        assert llm.engine.stats.num_prefix_hits == 0
