"""How many drafts each request verifies, and what is counted until the device has decided."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from piecegraph.runner.speculative.speculative_scheduler import SpeculativeScheduler
from piecegraph.runner.speculative.verified_output import VerifiedTokens

MAX_DRAFTS = 3


def scheduler(
    *, is_ahead: bool = False, is_uniform: bool = True, num_blocks: int = 16, budget: int = 32, **options: Any
) -> SpeculativeScheduler:
    return SpeculativeScheduler(
        max_drafts=MAX_DRAFTS,
        is_ahead=is_ahead,
        is_uniform=is_uniform,
        **options,
        kv_cache=KVCacheManager(
            num_blocks=num_blocks, block_size=4, max_num_batched_tokens=budget, enable_prefix_caching=False
        ),
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        watermark=0.0,
    )


def request(name: str, *, prompt_len: int = 5, max_tokens: int = 20, **extra_args: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[7] * prompt_len,
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=extra_args),
        seed=0,
        max_total_tokens=prompt_len + max_tokens,
        arrival=0,
    )


def complete(
    subject: SpeculativeScheduler, output: SchedulerOutput, num_tokens: int, num_next_drafts: int = MAX_DRAFTS
) -> None:
    """Every request that samples gets `num_tokens`, or as many as it verifies."""
    found = {}
    for item in output.sampled:
        num_drafts = output.num_drafts.get(item.request_id, 0)
        tokens = [9] * min(num_tokens, 1 + num_drafts)
        found[item.request_id] = VerifiedTokens(tokens, num_drafts, num_next_drafts, 0)
    subject.complete_verification(output, found)


def decoding(subject: SpeculativeScheduler, *requests: Request, num_next_drafts: int = MAX_DRAFTS) -> None:
    """Compute the prompts."""
    for one in requests:
        subject.add(one)
    complete(subject, subject.schedule(), 1, num_next_drafts)
    assert all(len(one.output_token_ids) == 1 for one in requests)


def test_rejected_drafts_are_not_counted() -> None:
    subject, one = scheduler(), request("a")
    decoding(subject, one)
    output = subject.schedule()
    assert output.num_drafts == {"a": 3} and output.num_tokens == 4
    assert (one.num_computed_tokens, one.num_tokens_with_pending, one.num_unverified_tokens) == (9, 10, 3)
    complete(subject, output, 2)
    assert (one.num_computed_tokens, one.num_tokens, one.num_tokens_with_pending) == (7, 8, 8)
    assert one.num_unverified_tokens == 0
    stats = subject.stats.speculation
    assert stats is not None and stats.num_accepted_by_position == (1, 0, 0)
    assert (stats.num_verifications, stats.num_draft_tokens, stats.num_wasted_tokens) == (1, 3, 2)
    assert str(stats) == "1 of 3 drafts accepted (33%), 2.00 tokens a verification"


def test_steps_ahead_count_the_most_until_they_are_known() -> None:
    subject, one = scheduler(is_ahead=True), request("a")
    subject.add(one)
    first = subject.schedule()
    second = subject.schedule()
    assert second.num_drafts == {"a": 3}
    complete(subject, first, 1)
    third = subject.schedule()
    assert third.num_drafts == {"a": 3}
    assert (one.num_computed_tokens, one.num_tokens_with_pending, one.num_unverified_tokens) == (13, 14, 6)
    complete(subject, second, 1)
    assert (one.num_computed_tokens, one.num_tokens_with_pending, one.num_unverified_tokens) == (10, 11, 3)
    complete(subject, third, 4)
    assert (one.num_computed_tokens, one.num_tokens_with_pending, one.num_unverified_tokens) == (10, 11, 0)
    assert one.num_tokens == 11


def test_nothing_behind_the_end_is_drafted() -> None:
    for max_tokens, expected in ((2, {}), (3, {"a": 1}), (4, {"a": 2}), (9, {"a": 3})):
        subject, one = scheduler(), request("a", max_tokens=max_tokens)
        decoding(subject, one)
        assert subject.schedule().num_drafts == expected


def test_requests_choose_fewer_or_none() -> None:
    subject = scheduler()
    few = [request("a", num_speculative_tokens=0), request("b", num_speculative_tokens=2), request("c")]
    decoding(subject, *few)
    output = subject.schedule()
    assert output.num_drafts == {"b": 2, "c": 3}
    assert [item.num_tokens for item in output.scheduled] == [1, 3, 4]


def test_without_drafts_a_step_is_a_plain_decode() -> None:
    subject, one, other = scheduler(), request("a"), request("b")
    decoding(subject, one, other, num_next_drafts=0)
    output = subject.schedule()
    assert output.num_drafts == {} and output.num_tokens == 2


def test_each_verifies_what_it_has_unless_one_graph_holds_all() -> None:
    for is_uniform, expected in ((True, {"a": 3, "b": 3}), (False, {"a": 1, "b": 1})):
        subject = scheduler(is_uniform=is_uniform)
        decoding(subject, request("a"), request("b"), num_next_drafts=1)
        assert subject.schedule().num_drafts == expected


def test_drafts_take_what_others_leave_of_the_budget() -> None:
    subject = scheduler(budget=8)
    decoding(subject, request("a"), request("b", prompt_len=3))
    output = subject.schedule()
    assert output.num_drafts == {"a": 3, "b": 3} and output.num_tokens == 8
    complete(subject, output, 1)
    subject.add(request("c", prompt_len=12))
    assert subject.schedule().num_tokens == 8, "drafts come before new prompts"


def test_drafts_take_no_block_from_a_request() -> None:
    """Each of two requests holds its blocks; one block is free, and the last draft of the second would need another."""
    subject = scheduler(num_blocks=5)
    one, other = request("a", max_tokens=10), request("b", max_tokens=10)
    decoding(subject, one, other)
    output = subject.schedule()
    assert output.num_drafts == {"a": 3, "b": 2}
    assert subject.stats.num_preemptions == 0 and subject.stats.num_free_blocks == 0


def test_a_preempted_request_keeps_the_tokens_that_a_step_decides_later() -> None:
    subject, one = scheduler(is_ahead=True), request("a")
    subject.add(one)
    complete(subject, subject.schedule(), 1)
    output = subject.schedule()
    subject._running.remove(one)
    subject._preempt(one)
    assert subject.schedule().is_empty, "its tokens are not known yet"
    complete(subject, output, 3)
    assert (one.num_tokens, one.num_tokens_with_pending, one.num_computed_tokens) == (9, 9, 0)
    again = subject.schedule()
    assert again.num_tokens == 9 and again.num_drafts == {}
    assert again.added[0].num_computed_tokens == 0


def test_steps_that_are_slower_with_drafts_stop_drafting() -> None:
    """Timed from when a step was scheduled, or the one before it completed, to its own completion."""
    now = [0.0]
    subject = scheduler(num_blocks=100, stops_when_slower=True, clock=lambda: now[0])
    decoding(subject, request("a", max_tokens=300))
    num_drafted = []
    for _ in range(120):
        output = subject.schedule()
        num_drafted.append(sum(output.num_drafts.values()))
        now[0] += 0.003 if output.num_drafts else 0.002
        complete(subject, output, 1)
        now[0] += 5.0  # the caller is slow, which is no part of a step
    assert num_drafted[0] == MAX_DRAFTS and not any(num_drafted[80:])
    stats = subject.stats.speculation
    assert stats is not None and stats.num_stopped_steps > 30
    assert stats.stop_reason.endswith("takes 3.00 ms, a step without drafts 2.00 ms")
    assert str(stats).endswith(
        f"; {stats.num_stopped_steps} steps without drafts, which are faster: {stats.stop_reason}"
    )


@pytest.mark.parametrize(("num_tokens", "stops"), [(1, True), (2, False)])
def test_a_draft_model_whose_passes_cost_the_most_is_stopped(num_tokens: int, stops: bool) -> None:
    """What is measured is a step without its passes, unless its drafts are accepted; then it reads on."""
    now = [0.0]
    subject = scheduler(num_blocks=100, stops_when_slower=True, num_slots_ahead=MAX_DRAFTS, clock=lambda: now[0])
    decoding(subject, request("a", max_tokens=300))
    num_drafted = []
    for _ in range(100):
        output = subject.schedule()
        num_drafted.append(sum(output.num_drafts.values()))
        now[0] += (0.0022 if output.num_drafts else 0.002) + (0.006 if output.drafts_next else 0.0)
        complete(subject, output, num_tokens)
    assert num_drafted[0] == MAX_DRAFTS and (not any(num_drafted[80:])) is stops
    assert subject.stats.speculation is not None
    assert bool(subject.stats.speculation.stop_reason) is stops
