"""A steady decode is scheduled as looking at each request would schedule it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler import REGISTRATION_INTERVAL, Scheduler
from piecegraph.runner.scheduling.scheduler_output import (
    SampledTokens,
    ScheduledDecodes,
    ScheduledRequest,
    SchedulerOutput,
)
from tests.runner.scheduling.make_request import make_request

BLOCK_SIZE = 3
BOTH_GROUPS = (KVCacheGroup(), KVCacheGroup(sliding_window=4))


class LooksAtEach(Scheduler):
    """Without steady decodes."""

    def schedule(self) -> SchedulerOutput:
        self._end_steady()
        return super().schedule()


class Event(NamedTuple):
    """Something that happens between two steps."""

    kind: str  # "add", "abort", "reset"
    number: int


def make(kind: type[Scheduler], *, num_blocks: int = 200, budget: int = 16, groups: int = 1) -> Scheduler:
    kv_cache = KVCacheManager(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_batched_tokens=budget, groups=BOTH_GROUPS[:groups]
    )
    return kind(kv_cache=kv_cache, max_num_seqs=5, max_num_batched_tokens=budget)


def tokens_of(output: SchedulerOutput, tokens: Sequence[int]) -> Mapping[str, int]:
    scheduled = output.scheduled
    if isinstance(scheduled, ScheduledDecodes):
        return SampledTokens(scheduled.request_ids, tokens)
    return SampledTokens([item.request_id for item in output.sampled], tokens)


def life(
    scheduler: Scheduler, asks: Sequence[tuple[int, int]], events: Sequence[Event | None], ahead: int
) -> list[object]:
    """Return everything that is scheduled and completed, step by step."""
    seen: list[object] = []
    in_flight: deque[SchedulerOutput] = deque()
    live: dict[str, Request] = {}

    def complete() -> None:
        output = in_flight.popleft()
        took = scheduler.complete_step(output, tokens_of(output, range(len(output.sampled))))
        seen.append([(request.request_id, list(request.output_token_ids)) for request in took])
        for request in list(took):
            if request.num_tokens == request.max_total_tokens:
                scheduler.finish(request.request_id, "length")
                del live[request.request_id]

    for number, (num_prompt, num_output) in enumerate(asks):
        request = make_request(str(number), [number + 1] * num_prompt, num_output)
        if scheduler.can_ever_fit(request.max_total_tokens):
            live[str(number)] = request
            scheduler.add(request)
    for event in events:
        if event is not None and event.kind == "abort" and str(event.number) in live:
            scheduler.abort(str(event.number))
            del live[str(event.number)]
        elif event is not None and event.kind == "reset":
            scheduler.reset_prefix_cache()
        elif event is not None and event.kind == "fail":
            scheduler.start_over(tuple(scheduler._requests.values()))
            in_flight.clear()
        output = scheduler.schedule()
        # How many blocks, not which: a preemption releases them in another order.
        blocks = [(each.request_id, each.group, each.start, len(each.block_ids)) for each in output.new_blocks]
        added = [(each.request_id, each.num_computed_tokens) for each in output.added]
        seen.append((tuple(output.scheduled), added, blocks, output.removed))
        seen.append([(r.num_computed_tokens, r.num_tokens_with_pending, r.num_slots) for r in live.values()])
        if not output.is_empty:
            in_flight.append(output)
        if in_flight and (output.is_empty or len(in_flight) > ahead):
            complete()
    seen.append((scheduler.stats, sorted(live)))
    return seen


@given(
    asks=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 25)), min_size=1, max_size=7),
    events=st.lists(
        st.one_of(
            st.none(),
            st.none(),
            st.none(),
            st.builds(Event, st.sampled_from(["abort", "reset", "fail"]), st.integers(0, 6)),
        ),
        min_size=30,
        max_size=60,
    ),
    ahead=st.integers(0, 2),
    num_blocks=st.sampled_from([16, 24, 200]),
    groups=st.integers(1, 2),
    budget=st.sampled_from([4, 16]),
)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_a_steady_decode_equals_a_loop_over_requests(
    asks: list[tuple[int, int]],
    events: list[Event | None],
    ahead: int,
    num_blocks: int,
    groups: int,
    budget: int,
) -> None:
    """Step by step the same, numbers of blocks included: with ends, aborts, preemptions, failures and windows."""
    found, expected = (
        life(make(kind, num_blocks=num_blocks, groups=groups, budget=budget), asks, events, ahead)
        for kind in (Scheduler, LooksAtEach)
    )
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, step


def decoding(num_outputs: Sequence[int]) -> tuple[Scheduler, list[Request]]:
    """Requests that have just begun to decode."""
    scheduler = make(Scheduler)
    requests = [make_request(str(i), [i + 1] * 2, num_output) for i, num_output in enumerate(num_outputs)]
    for request in requests:
        scheduler.add(request)
    scheduler.complete_step(first := scheduler.schedule(), tokens_of(first, range(len(requests))))
    scheduler.complete_step(second := scheduler.schedule(), tokens_of(second, range(len(requests))))
    return scheduler, requests


def step(scheduler: Scheduler) -> tuple[ScheduledDecodes, Sequence[Request]]:
    """One that must be steady."""
    output = scheduler.schedule()
    assert isinstance(output.scheduled, ScheduledDecodes)
    return output.scheduled, scheduler.complete_step(output, tokens_of(output, range(len(output.scheduled))))


def test_steps_of_the_same_requests_share_their_request_ids() -> None:
    """Ids and the list of who took a token are the very objects of the step before; an end makes new ones."""
    scheduler, requests = decoding([20, 20, 20])
    first, took_first = step(scheduler)
    second, took_second = step(scheduler)
    assert first.request_ids is second.request_ids and took_first is took_second
    scheduler.finish("1", "stop")
    third, took_third = step(scheduler)
    assert third.request_ids == ("0", "2") and took_third == [requests[0], requests[2]]
    assert took_second == requests


def test_a_complete_request_is_removed_and_the_others_continue() -> None:
    scheduler, requests = decoding([4, 20])
    assert [step(scheduler)[0].request_ids for _ in range(3)] == [("0", "1"), ("0", "1"), ("1",)]
    assert requests[0].num_tokens == requests[0].max_total_tokens


def test_a_request_that_can_be_admitted_ends_a_steady_decode() -> None:
    scheduler, _ = decoding([20, 20])
    step(scheduler)
    scheduler.add(make_request("new", [9, 9], 5))
    output = scheduler.schedule()
    assert [one.request_id for one in output.added] == ["new"]
    assert len(output.scheduled) == 3


def test_decodes_are_a_sequence_of_their_parts() -> None:
    scheduler, _ = decoding([20, 20])
    (scheduled, _) = step(scheduler)
    parts = [ScheduledRequest("0", 1, 3, True, 1), ScheduledRequest("1", 1, 3, True, 2)]
    assert list(scheduled) == parts and scheduled == parts and scheduled != parts[:1]
    assert (scheduled[0], scheduled[-1], scheduled[:1]) == (parts[0], parts[1], (parts[0],))


def test_sampled_tokens_are_a_mapping() -> None:
    tokens = SampledTokens(["a", "b"], [7, 8])
    assert tokens == {"a": 7, "b": 8} and list(tokens) == ["a", "b"] and tokens["b"] == 8
    with pytest.raises(KeyError):
        tokens["c"]


def test_steps_change_no_request_until_it_is_read() -> None:
    """Tokens and counts are always right to whoever reads them, however many steps were kept together."""
    scheduler, requests = decoding([30, 30])
    for _ in range(5):
        step(scheduler)
    assert [len(request.settled_output_token_ids) for request in requests] == [2, 2]
    assert requests[1].output_token_ids == [1] * 7  # 1 is the token of the second in every step
    assert [request.settled_output_token_ids for request in requests] == [[0] * 7, [1] * 7]
    assert [(r.num_computed_tokens, r.num_tokens_with_pending) for r in requests] == [(8, 9), (8, 9)]
    step(scheduler)
    assert [len(request.output_token_ids) for request in requests] == [8, 8]


def test_counts_of_a_steady_request_cannot_be_set() -> None:
    scheduler, requests = decoding([30, 30])
    step(scheduler)
    with pytest.raises(AssertionError, match="'0' decodes steadily"):
        requests[0].num_computed_tokens = 0
    scheduler.finish("0", "stop")
    requests[0].num_computed_tokens = 0


@pytest.mark.parametrize("how", ["finish", "add"])
def test_blocks_that_a_steady_decode_filled_are_found_after_it(how: str) -> None:
    """By a request that begins as the prompt and the output of one that left, or that still runs."""
    scheduler, requests = decoding([30, 30])
    for _ in range(11):
        step(scheduler)
    tokens = requests[1].token_ids(0, requests[1].num_tokens)  # 15, of which the last is not computed
    if how == "finish":
        scheduler.finish("1", "stop")
    scheduler.add(make_request("new", [*tokens, 7], 2))
    (added,) = scheduler.schedule().added
    assert added.num_computed_tokens == (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE == 12


def test_a_long_steady_decode_registers_filled_blocks_at_intervals() -> None:
    """So that little is left for the moment it ends."""
    kv_cache = KVCacheManager(num_blocks=200, block_size=BLOCK_SIZE, max_num_batched_tokens=16)
    scheduler = Scheduler(kv_cache=kv_cache, max_num_seqs=5, max_num_batched_tokens=16)
    scheduler.add(make_request("a", [1, 2], 300))
    for number in range(2 * REGISTRATION_INTERVAL):
        output = scheduler.schedule()
        scheduler.complete_step(output, tokens_of(output, [number]))
    assert kv_cache.pool.num_named == (2 * REGISTRATION_INTERVAL + 1) // BLOCK_SIZE
