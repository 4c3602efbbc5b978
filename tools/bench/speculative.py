"""Measure tokens a second with and without drafts, by method and number of drafts, where both write the same."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from piecegraph.errors import VerificationError
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.llm import LLM
from piecegraph.runner.scheduling.speculation_stats import SpeculationStats
from piecegraph.runner.speculative.drafter import Drafter

NOISE: Mapping[torch.dtype, float] = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""By dtype, the difference of two tokens' log probabilities up to which they nearly tie.

A verification computes logits of other numbers of rows, so that rounding may choose between such tokens.
"""

NO_DRAFTS = "none"
"""The method of the row without drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeRow:
    """The runs with one kind of drafts, or without."""

    method: str
    num_drafts: int
    output_tokens: int
    seconds: tuple[float, ...]  # of each run
    num_ties: int  # answers that go on differently behind two tokens that nearly tie
    speculation: SpeculationStats | None  # of the timed runs
    is_synthetic: bool = False  # drafts were accepted by given rates, so answers were not compared and mean nothing
    steps: Mapping[str, int] = field(default_factory=dict)  # of the timed runs, by mode, those that read prompts too
    num_draft_graphs: int = 0  # replays after them that drafted
    num_draft_passes: int = 0  # drafts without a graph after them

    @property
    def ms_per_step(self) -> float | None:
        """The milliseconds of a step in the mean of all timed runs; those that read prompts are among them."""
        num_steps = sum(self.steps.values())
        return 1000 * sum(self.seconds) / num_steps if num_steps else None

    @property
    def tokens_per_s(self) -> float:
        """The output tokens a second of the median run."""
        return self.output_tokens / sorted(self.seconds)[(len(self.seconds) - 1) // 2]

    def as_record(self) -> dict[str, object]:
        """Return every field by name, derived values included."""
        drafted = self.speculation
        return {
            "method": self.method,
            "num_speculative_tokens": self.num_drafts,
            "is_synthetic": self.is_synthetic,
            "tokens_per_s": self.tokens_per_s,
            "output_tokens": self.output_tokens,
            "seconds": list(self.seconds),
            "num_ties": self.num_ties,
            "acceptance_rate": None if drafted is None else drafted.acceptance_rate,
            "mean_acceptance_length": None if drafted is None else drafted.mean_acceptance_length,
            "accepted_by_position": None if drafted is None else list(drafted.num_accepted_by_position),
            "ms_per_step": self.ms_per_step,
            "steps": dict(self.steps),
            "draft_graphs": self.num_draft_graphs,
            "draft_passes_without_a_graph": self.num_draft_passes,
        }


def answers(
    llm: LLM, prompts: Sequence[Any], max_tokens: int, *, logprobs: int | None = None
) -> Sequence[RequestOutput]:
    """Return the greedy answers of exactly `max_tokens` tokens, computed with an empty prefix cache."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    return llm.generate(list(prompts), params, use_tqdm=False)


def measure(
    llm: LLM,
    prompts: Sequence[Any],
    max_tokens: int,
    *,
    method: str,
    num_drafts: int,
    repeat: int,
    expected: Sequence[RequestOutput],
) -> SpeculativeRow:
    """Return the row of `llm`, after a run that warms up and whose answers are compared with `expected`.

    Raises `VerificationError`, so that there is no figure, if they differ by more than `NOISE` explains. With synthetic
    acceptance answers mean nothing and are not compared, which the row says.
    """
    dtype = next(iter(llm.runner.step.kv_caches.values())).key.dtype
    found, stats = answers(llm, prompts, max_tokens), llm.engine.stats.speculation
    is_synthetic = stats is not None and stats.is_synthetic
    num_ties = 0 if is_synthetic else count_ties(found, expected, NOISE[dtype])
    before, seconds = _Counts.of(llm), []
    for _ in range(repeat):
        started = time.perf_counter()
        answers(llm, prompts, max_tokens)
        seconds.append(time.perf_counter() - started)
    after = _Counts.of(llm)
    return SpeculativeRow(
        method=method,
        num_drafts=num_drafts,
        output_tokens=len(prompts) * max_tokens,
        seconds=tuple(seconds),
        num_ties=num_ties,
        speculation=_since(before.speculation, after.speculation),
        is_synthetic=is_synthetic,
        steps={mode: count - before.steps.get(mode, 0) for mode, count in after.steps.items()},
        num_draft_graphs=after.num_draft_graphs - before.num_draft_graphs,
        num_draft_passes=after.num_draft_passes - before.num_draft_passes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """What an engine has counted since its start."""

    speculation: SpeculationStats | None
    steps: Mapping[str, int]  # by mode
    num_draft_graphs: int
    num_draft_passes: int

    @classmethod
    def of(cls, llm: LLM) -> _Counts:
        drafter: Drafter | None = getattr(llm.runner, "drafter", None)
        return cls(
            speculation=llm.engine.stats.speculation,
            steps={mode.value: count for mode, count in llm.runner.counters.by_mode().items()},
            num_draft_graphs=0 if drafter is None else drafter.num_replays,
            num_draft_passes=0 if drafter is None else drafter.num_uncaptured,
        )


def count_ties(found: Sequence[RequestOutput], expected: Sequence[RequestOutput], noise: float) -> int:
    """Return how many answers differ behind two tokens whose log probabilities differ by `noise` at most.

    `expected` has the log probabilities of two tokens or more. Raises `VerificationError` for any other difference.
    """
    num_ties = 0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        one, other = ours.outputs[0], theirs.outputs[0]
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        place = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
        if place is None:
            continue
        assert other.logprobs is not None
        row: Mapping[int, Any] = other.logprobs[place] or {}
        left, right = row.get(one.token_ids[place]), row[other.token_ids[place]]
        if left is None or abs(left.logprob - right.logprob) > noise:
            raise VerificationError(
                f"the answer to prompt {number} differs with drafts at token {place}: {one.token_ids[place]} instead "
                f"of {other.token_ids[place]}, which do not nearly tie. No figure is printed for runs that differ."
            )
        num_ties += 1
    return num_ties


def _since(before: SpeculationStats | None, after: SpeculationStats | None) -> SpeculationStats | None:
    """Return the counts between two moments."""
    if before is None or after is None:
        return after
    pairs = zip(after.num_accepted_by_position, before.num_accepted_by_position, strict=True)
    return replace(
        after,
        num_verifications=after.num_verifications - before.num_verifications,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        num_accepted_by_position=tuple(now - then for now, then in pairs),
    )
