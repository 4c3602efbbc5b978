"""Who runs in a step, who gives way, and what becomes of tokens in flight."""

from __future__ import annotations

import pytest

from piecegraph.errors import RequestError
from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.request_queue import SchedulingPolicy
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from tests.runner.scheduling.make_request import make_request


def make_scheduler(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    budget: int = 8,
    policy: SchedulingPolicy = SchedulingPolicy.FCFS,
    watermark: float = 0.0,
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),),
) -> Scheduler:
    """Blocks of 4 tokens."""
    kv_cache = KVCacheManager(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=budget, groups=groups)
    return Scheduler(
        kv_cache=kv_cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=policy,
        watermark=watermark,
        prompt_logprobs_chunk=3,
    )


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def shares(output: SchedulerOutput) -> dict[str, int]:
    return {item.request_id: item.num_tokens for item in output.scheduled}


def complete(scheduler: Scheduler, output: SchedulerOutput, token: int = 5) -> list[Request]:
    return list(scheduler.complete_step(output, {item.request_id: token for item in output.sampled}))


def step(scheduler: Scheduler) -> SchedulerOutput:
    """Schedule one step and complete it."""
    output = scheduler.schedule()
    complete(scheduler, output)
    return output


def test_a_long_prompt_runs_in_chunks() -> None:
    """Only the last chunk samples; then it decodes a token a step."""
    scheduler = make_scheduler(budget=8)
    add(scheduler, make_request("a", 19))
    outputs = [step(scheduler) for _ in range(5)]
    assert [(shares(output)["a"], len(output.sampled)) for output in outputs] == [
        (8, 0),
        (8, 0),
        (3, 1),
        (1, 1),
        (1, 1),
    ]
    assert [output.scheduled[0].num_computed_tokens for output in outputs] == [0, 8, 16, 19, 20]


def test_a_request_is_added_once_with_all_it_needs_and_then_only_its_blocks_grow() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 4)
    add(scheduler, request)
    first = step(scheduler)
    (added,) = first.added
    assert list(added.token_ids) == request.prompt_token_ids and added.num_prompt_tokens == 4
    assert added.num_computed_tokens == 0 and len(added.block_ids[0]) == 1 and not first.new_blocks
    second = step(scheduler)
    (blocks,) = second.new_blocks
    assert not second.added and (blocks.start, len(blocks.block_ids)) == (1, 1)
    assert not step(scheduler).new_blocks


def test_decodes_come_first_and_prompts_get_the_rest() -> None:
    scheduler = make_scheduler(budget=8)
    add(scheduler, make_request("a", 3))
    step(scheduler)
    add(scheduler, make_request("b", 20))
    assert list(shares(step(scheduler)).items()) == [("a", 1), ("b", 7)]


def test_requests_of_one_token_are_adjacent() -> None:
    """A chunk in the middle of its prompt may come before a decode in turn, but not in the batch."""
    scheduler = make_scheduler(budget=8, policy=SchedulingPolicy.PRIORITY)
    add(scheduler, make_request("late", 3, priority=1))
    step(scheduler)
    add(scheduler, make_request("long", 13, priority=0))
    step(scheduler)  # "late" decodes, "long" gets 7 of its 13
    assert list(shares(step(scheduler)).items()) == [("late", 1), ("long", 6)]


def test_no_more_requests_than_rows() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(make_request(name, 2) for name in "abc"))
    assert set(shares(step(scheduler))) == {"a", "b"}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.finish("a", "stop")
    output = step(scheduler)
    assert set(shares(output)) == {"b", "c"} and output.removed == ("a",)


@pytest.mark.parametrize(
    ("policy", "order"), [(SchedulingPolicy.FCFS, ["a", "b", "c"]), (SchedulingPolicy.PRIORITY, ["b", "c", "a"])]
)
def test_waiting_requests_enter_in_the_order_of_the_policy(policy: SchedulingPolicy, order: list[str]) -> None:
    scheduler = make_scheduler(policy=policy)
    add(scheduler, make_request("a", 2, priority=1), make_request("b", 2), make_request("c", 2))
    assert list(shares(step(scheduler))) == order


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4, budget=16)
    add(scheduler, make_request("a", 8, 4), make_request("big", 12, 4), make_request("small", 1, 1))
    assert list(shares(step(scheduler))) == ["a"]
    scheduler.finish("a", "stop")
    assert list(shares(step(scheduler))) == ["small", "big"]  # one token, hence first in the batch


def test_admission_spares_blocks_for_running_requests() -> None:
    """Unless none does: then a request may have all."""
    scheduler = make_scheduler(num_blocks=4, watermark=0.5, budget=16)
    add(scheduler, make_request("a", 4, 1), make_request("b", 7, 1))
    assert list(shares(step(scheduler))) == ["a"]  # "b" would leave 1 block of 4
    scheduler.finish("a", "stop")
    add(scheduler, make_request("all", 15, 1))
    assert list(shares(step(scheduler))) == ["b"]
    scheduler.finish("b", "stop")
    assert list(shares(step(scheduler))) == ["all"]


def test_a_step_ahead_computes_the_pending_token() -> None:
    """The same tokens as without, scheduled before the host knows any."""
    scheduler = make_scheduler()
    request = make_request("a", 3, 3)
    add(scheduler, request)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [shares(output)["a"] for output in (first, second, third)] == [3, 1, 1]
    assert request.num_pending_tokens == 3 and request.output_token_ids == []
    assert scheduler.schedule().is_empty  # known and pending tokens are all there may be
    for token, output in enumerate((first, second, third)):
        assert complete(scheduler, output, token) == [request]
    assert request.output_token_ids == [0, 1, 2] and request.num_pending_tokens == 0
    assert scheduler.schedule().is_empty


def test_tokens_in_flight_of_a_finished_request_are_dropped() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3)
    add(scheduler, request)
    complete(scheduler, scheduler.schedule())
    ahead = scheduler.schedule()
    assert scheduler.finish("a", "stop", 5) is request
    assert (request.finish_reason, request.stop_reason) == ("stop", 5)
    assert complete(scheduler, ahead) == []
    assert request.output_token_ids == [5] and not scheduler.has_unfinished


def test_a_step_in_flight_gives_no_token_to_a_new_request_with_an_old_id() -> None:
    """Neither while it waits nor when it runs."""
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort("a")
    new = make_request("a", 3)
    add(scheduler, new)
    assert complete(scheduler, first) == []
    third = scheduler.schedule()
    assert third.removed == ("a",) and [added.request_id for added in third.added] == ["a"]
    assert complete(scheduler, second) == []
    assert complete(scheduler, third) == [new]
    assert new.output_token_ids == [5]


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 3))
    with pytest.raises(RequestError, match="request_id='a' is in use by an unfinished request; choose another"):
        scheduler.add(make_request("a", 3))


def test_an_unknown_id_is_no_error_to_abort() -> None:
    """A request may end just before its abort arrives."""
    assert make_scheduler().abort("gone") is None


def test_a_request_aborted_while_it_waits_was_never_there_for_the_runner() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, make_request("a", 3), make_request("b", 3))
    step(scheduler)
    assert scheduler.abort("b") is not None
    assert step(scheduler).removed == ()
    assert scheduler.num_waiting == 0


def test_removals_wait_for_an_output_that_runs() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 3))
    step(scheduler)
    scheduler.abort("a")
    empty = scheduler.schedule()
    assert empty.is_empty and empty.removed == ()
    add(scheduler, make_request("b", 3))
    assert step(scheduler).removed == ("a",)


def out_of_blocks(
    policy: SchedulingPolicy = SchedulingPolicy.FCFS, *priorities: int
) -> tuple[Scheduler, list[Request]]:
    """Two requests that fill 4 blocks with 2 x 8 tokens, and need one more each for the next."""
    scheduler = make_scheduler(num_blocks=4, budget=16, policy=policy)
    requests = [
        make_request(name, 7, 9, priority=priority) for name, priority in zip("ab", priorities or (0, 0), strict=True)
    ]
    add(scheduler, *requests)
    step(scheduler)
    return scheduler, requests


@pytest.mark.parametrize(("priorities", "stays"), [((0, 0), "a"), ((1, 0), "b"), ((0, 1), "a")])
def test_the_last_in_order_is_preempted(priorities: tuple[int, int], stays: str) -> None:
    """The latest, or the one of the largest priority; even if it is the one that needs the block."""
    scheduler, requests = out_of_blocks(SchedulingPolicy.PRIORITY, *priorities)
    step(scheduler)
    output = step(scheduler)
    assert list(shares(output)) == [stays]
    (gone,) = (request for request in requests if request.request_id != stays)
    assert output.removed == (gone.request_id,) and not output.added
    assert gone.num_preemptions == scheduler.stats.num_preemptions == 1
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_a_late_request_of_a_smaller_priority_value_is_not_preempted() -> None:
    """Nor do those before it: it is the order that counts, not who was admitted last."""
    scheduler = make_scheduler(num_blocks=4, budget=16, policy=SchedulingPolicy.PRIORITY)
    add(scheduler, make_request("early", 7, 9, priority=1))
    step(scheduler)
    add(scheduler, make_request("late", 8, 8, priority=0))
    step(scheduler)
    output = step(scheduler)
    assert list(shares(output)) == ["late"] and output.removed == ("early",)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    """Blocks were short a moment ago; those that run come first. The next step may admit."""
    scheduler, _ = out_of_blocks(SchedulingPolicy.PRIORITY, 1, 1)
    step(scheduler)
    add(scheduler, make_request("urgent", 2, priority=0))
    preempting = step(scheduler)
    assert preempting.removed == ("b",) and not preempting.added
    assert [added.request_id for added in step(scheduler).added] == ["urgent"]


def test_the_last_request_is_preempted_itself() -> None:
    """It asks for a block when the one before it has what it needs."""
    scheduler = make_scheduler(num_blocks=4, budget=16)
    first, last = make_request("first", 5, 7), make_request("last", 8, 4)
    add(scheduler, first, last)
    step(scheduler)
    output = step(scheduler)
    assert list(shares(output)) == ["first"] and output.removed == ("last",)


def test_a_preempted_request_comes_back_with_all_it_knows() -> None:
    """Resumption is a fresh add, before whoever arrived later; its own prefix may still be cached."""
    scheduler, (_, b) = out_of_blocks()
    late = make_request("late", 2)
    add(scheduler, late)
    step(scheduler)
    step(scheduler)
    assert b.num_computed_tokens == 0 and b.output_token_ids == [5, 5]
    scheduler.finish("a", "stop")
    output = step(scheduler)
    assert [added.request_id for added in output.added] == ["b", "late"]
    again = output.added[0]
    assert list(again.token_ids) == [*b.prompt_token_ids, 5, 5] and again.num_prompt_tokens == 7
    assert again.num_computed_tokens == 4  # the tail of its 8 is what "a" took
    assert b.output_token_ids == [5, 5, 5] and b.num_cached_tokens == 0


def test_a_token_in_flight_of_a_preempted_request_is_kept() -> None:
    """It cannot resume before it has arrived: it would compute it twice, or sample it anew."""
    scheduler, (_, b) = out_of_blocks()
    ahead = scheduler.schedule()  # the last token both have room for
    preempting = scheduler.schedule()
    assert preempting.removed == ("b",) and b.num_pending_tokens == 1
    scheduler.finish("a", "stop")
    assert scheduler.schedule().is_empty  # all blocks are free, but the token of "b" is not there
    assert complete(scheduler, ahead, 7) == [b]
    assert b.output_token_ids == [5, 7] and b.num_pending_tokens == 0
    assert complete(scheduler, preempting) == []
    (again,) = scheduler.schedule().added
    assert list(again.token_ids) == [*b.prompt_token_ids, 5, 7]


def test_a_prefix_is_shared_from_the_step_that_computes_it() -> None:
    """With that very step's requests, too: prompts that arrive together and begin alike cost one prefill."""
    scheduler = make_scheduler(budget=32)
    prompt = list(range(9))
    add(scheduler, make_request("a", prompt))
    add(scheduler, make_request("b", prompt))
    output = scheduler.schedule()
    assert [added.num_computed_tokens for added in output.added] == [0, 8]
    assert shares(output) == {"a": 9, "b": 1}
    c = make_request("c", prompt)
    add(scheduler, c)
    output = scheduler.schedule()
    assert output.added[0].num_computed_tokens == 8 and shares(output)["c"] == 1
    assert c.num_cached_tokens == 8
    stats = scheduler.stats
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (27, 16)
    scheduler.reset_prefix_cache()
    add(scheduler, make_request("d", prompt))
    assert scheduler.schedule().added[0].num_computed_tokens == 0


def test_prompt_logprobs_are_computed_in_small_chunks() -> None:
    """3 tokens a step here; other requests use the rest of the budget."""
    scheduler = make_scheduler(budget=8)
    add(scheduler, make_request("a", 7, prompt_logprobs=True), make_request("b", 20))
    assert [shares(step(scheduler)) for _ in range(4)] == [
        {"a": 3, "b": 5},
        {"a": 3, "b": 5},
        {"a": 1, "b": 7},
        {"a": 1, "b": 3},
    ]


def test_prompts_whose_logprobs_are_wanted_share_the_rows_of_a_step() -> None:
    """3 in all, by order, running or not yet; who gets none waits, and nobody overtakes who is not admitted."""
    scheduler = make_scheduler(budget=8)
    wanting = [make_request(name, length, prompt_logprobs=True) for name, length in (("a", 4), ("b", 5))]
    add(scheduler, *wanting, make_request("c", 2))
    assert [shares(step(scheduler)) for _ in range(5)] == [
        {"a": 3},
        {"a": 1, "b": 3, "c": 2},  # the last token of a prompt alone takes no row
        {"a": 1, "b": 2, "c": 1},
        {"a": 1, "b": 1, "c": 1},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_a_window_lets_a_small_cache_hold_a_long_request() -> None:
    """100 tokens through 4 blocks of 4, without preemption."""
    scheduler = make_scheduler(num_blocks=4, budget=4, groups=(KVCacheGroup(sliding_window=6),))
    request = make_request("a", 60, 40)
    assert scheduler.can_ever_fit(100) and scheduler.blocks_needed(100) == 3
    add(scheduler, request)
    while request.num_tokens < 100:
        assert not step(scheduler).is_empty
    scheduler.finish("a", "length")
    assert request.num_preemptions == 0 and scheduler.stats.num_free_blocks == 4


def test_steps_complete_in_order() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(AssertionError, match="step 2 completed, 1 is next"):
        complete(scheduler, second)
    assert first.step == 1


def test_a_request_that_can_never_fit_is_not_accepted() -> None:
    scheduler = make_scheduler(num_blocks=2)
    assert scheduler.can_ever_fit(8) and not scheduler.can_ever_fit(9)
    with pytest.raises(AssertionError, match="the engine refuses such requests"):
        scheduler.add(make_request("a", 5, 4))


def test_priority_takes_no_tokens_from_running_requests() -> None:
    """However many prompts of a higher priority come, who decodes goes on; they begin as soon as they have a place."""
    scheduler = make_scheduler(budget=4, max_num_seqs=2, policy=SchedulingPolicy.PRIORITY)
    add(scheduler, make_request("low", 2, 30, priority=9))
    step(scheduler)
    for number in range(6):
        add(scheduler, make_request(f"high {number}", 9, 1, priority=-number))
    for number in range(12):
        found = shares(step(scheduler))
        assert found["low"] == 1, f"it had no turn in step {number}"
        assert sum(found.values()) == 4, "the rest of the budget is for prompts"
        for name in [name for name, request in scheduler._requests.items() if request.output_token_ids]:
            if name != "low":
                scheduler.finish(name, "length")
    assert scheduler.stats.num_preemptions == 0


def test_priority_orders_the_queue_and_takes_no_place_from_running_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=2, policy=SchedulingPolicy.PRIORITY)
    add(scheduler, make_request("a", 2, priority=5), make_request("b", 2, priority=6))
    step(scheduler)
    add(scheduler, make_request("c", 2, priority=1), make_request("d", 2, priority=0))
    assert all(shares(step(scheduler)) == {"a": 1, "b": 1} for _ in range(3))
    scheduler.finish("a", "stop")
    assert shares(step(scheduler)) == {"b": 1, "d": 2}


def test_priority_decides_which_request_is_preempted() -> None:
    """The one that came first, if its priority is the lowest; it is next again."""
    scheduler = make_scheduler(num_blocks=4, policy=SchedulingPolicy.PRIORITY)
    low, high = make_request("low", 4, 12, priority=1), make_request("high", 4, 12, priority=0)
    add(scheduler, low)
    step(scheduler)
    add(scheduler, high)
    while not scheduler.stats.num_preemptions:
        output = step(scheduler)
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)
    assert shares(output) == {"high": 1} and scheduler.num_waiting == 1
