"""First come, first served; never more tokens, requests or blocks than there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piecegraph.runner.block_pool import BlockPool
from piecegraph.runner.scheduler import Scheduler, SchedulerOutput
from tests.runner.make_request import make_request


def make_scheduler(*, num_blocks: int = 16, max_num_seqs: int = 4, budget: int = 8) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(pool=pool, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return scheduler, pool


def shares(step: SchedulerOutput) -> dict[str, int]:
    return {item.request.request_id: item.num_tokens for item in step.scheduled}


def advance(step: SchedulerOutput) -> None:
    """What the engine does after a step, with token 0 for every draw."""
    for item in step.scheduled:
        item.request.num_computed_tokens += item.num_tokens
    for item in step.sampled:
        item.request.output_token_ids.append(0)


def test_a_long_prompt_runs_in_chunks() -> None:
    """Only the last chunk samples; then it decodes a token a step."""
    scheduler, _ = make_scheduler(budget=8)
    scheduler.add(make_request("a", 19))
    seen = []
    for _ in range(5):
        step = scheduler.schedule()
        seen.append((shares(step)["a"], len(step.sampled)))
        advance(step)
    assert seen == [(8, 0), (8, 0), (3, 1), (1, 1), (1, 1)]


def test_decodes_go_first_and_prompts_get_the_rest() -> None:
    scheduler, _ = make_scheduler(budget=8)
    scheduler.add(make_request("a", 3))
    advance(scheduler.schedule())
    scheduler.add(make_request("b", 20))
    step = scheduler.schedule()
    assert list(shares(step).items()) == [("a", 1), ("b", 7)]


def test_a_request_waits_until_its_whole_length_fits() -> None:
    """Nobody overtakes it, and nobody running has to give way."""
    scheduler, pool = make_scheduler(num_blocks=4)
    first, second, third = make_request("a", 6, 6), make_request("b", 4, 4), make_request("c", 1, 1)
    for request in (first, second, third):
        scheduler.add(request)
    assert list(shares(scheduler.schedule())) == ["a"]
    assert pool.num_free == 1
    scheduler.finish(first)
    assert list(shares(scheduler.schedule())) == ["c", "b"]  # one token, hence first in the batch


def test_no_more_requests_than_asked_for() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 2))
    assert set(shares(scheduler.schedule())) == {"a", "b"}


def test_a_waiting_request_can_be_taken_off() -> None:
    scheduler, pool = make_scheduler(num_blocks=2)
    running, waiting = make_request("a", 4, 4), make_request("b", 4, 4)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    scheduler.finish(waiting)
    scheduler.finish(running)
    assert not scheduler.has_unfinished
    assert pool.num_free == 2


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(9, 20),
)
def test_everything_ends_within_its_means(
    sizes: list[tuple[int, int]], max_num_seqs: int, budget: int, num_blocks: int
) -> None:
    """Any workload: each step keeps to the budget, each token is computed once, all blocks come back."""
    scheduler, pool = make_scheduler(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget)
    requests = [make_request(str(i), num_prompt, n) for i, (num_prompt, n) in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    num_steps = 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert 0 < step.num_tokens <= budget
        assert len(step.scheduled) <= max_num_seqs
        advance(step)
        for item in step.sampled:
            if item.request.num_tokens >= item.request.max_total_tokens:
                scheduler.finish(item.request)
        num_steps += 1
        assert num_steps < 2000
    assert pool.num_free == num_blocks
    assert all(request.num_computed_tokens == request.max_total_tokens - 1 for request in requests)
