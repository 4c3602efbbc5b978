from __future__ import annotations

from collections import deque
from random import Random

import pytest

from piecegraph import SamplingParams
from piecegraph.runner.pipeline_parallel.pipeline_scheduler import PipelineScheduler
from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler_output import SampledTokens, SchedulerOutput


def scheduler(num_stages: int, *, num_blocks: int = 200, max_num_batched_tokens: int = 64) -> PipelineScheduler:
    return PipelineScheduler(
        num_stages=num_stages,
        kv_cache=KVCacheManager(
            num_blocks=num_blocks,
            block_size=4,
            max_num_batched_tokens=max_num_batched_tokens,
            groups=(KVCacheGroup(layers=(0,)),),
        ),
        max_num_seqs=16,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def request(number: int, num_prompt: int = 3, num_new: int = 8) -> Request:
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=[number + 1] * num_prompt,
        sampling_params=SamplingParams(max_tokens=num_new),
        seed=0,
        max_total_tokens=num_prompt + num_new,
        arrival=number,
    )


def complete(made: PipelineScheduler, output: SchedulerOutput) -> None:
    ids = [item.request_id for item in output.sampled]
    for each in list(made.complete_step(output, SampledTokens(ids, [1] * len(ids)))):
        if each.num_tokens == each.max_total_tokens:
            made.finish(each.request_id, "length")


def test_each_stage_has_a_batch_of_its_own() -> None:
    """Seven requests in three stages: batches of three, three and one; no request is in two of them."""
    made = scheduler(3)
    for number in range(7):
        made.add(request(number))
    complete(made, made.schedule())  # all prompts
    batches = [made.schedule() for _ in range(3)]
    assert [len(batch.scheduled) for batch in batches] == [3, 3, 1]
    assert len({item.request_id for batch in batches for item in batch.scheduled}) == 7
    assert made.schedule().is_empty
    complete(made, batches[0])
    assert {item.request_id for item in made.schedule().scheduled} == {"r0", "r1", "r2"}


def test_stages_without_a_batch_are_counted() -> None:
    """One request keeps one of three stages busy, three requests all; nothing is counted without requests."""
    made = scheduler(3)
    assert made.schedule().is_empty
    assert made.stats.num_bubbles == 0
    made.add(request(0, num_new=3))
    for _ in range(3):
        output = made.schedule()
        assert made.schedule().is_empty
        complete(made, output)
    assert made.schedule().is_empty
    assert (made.stats.num_pipeline_steps, made.stats.num_bubbles) == (3, 6)
    for number in range(3):
        made.add(request(number, num_new=3))
    complete(made, made.schedule())  # all prompts
    batches = deque(made.schedule() for _ in range(3))
    for _ in range(3):
        complete(made, batches.popleft())
        batches.append(made.schedule())
    assert (made.stats.num_pipeline_steps, made.stats.num_bubbles) == (10, 6)


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """The next chunk needs no token of the one in flight; nothing is scheduled behind the last."""
    made = scheduler(2, max_num_batched_tokens=8)
    made.add(request(0, num_prompt=20))
    assert [made.schedule().num_tokens for _ in range(4)] == [8, 8, 4, 0]


@pytest.mark.parametrize("seed", range(5))
def test_every_request_ends_with_its_tokens(seed: int) -> None:
    """Random arrivals and few blocks: a request is never scheduled while its token is in flight, and none waits."""
    random, made = Random(seed), scheduler(3, num_blocks=16, max_num_batched_tokens=12)
    coming = [request(number, random.randrange(1, 20), random.randrange(1, 12)) for number in range(20)]
    everything = list(coming)
    in_flight: deque[SchedulerOutput] = deque()
    for _ in range(2000):
        if coming and random.random() < 0.5:
            made.add(coming.pop(0))
        output = made.schedule()
        waiting = {item.request_id for batch in in_flight for item in batch.sampled}
        assert waiting.isdisjoint(item.request_id for item in output.scheduled)
        if not output.is_empty:
            in_flight.append(output)
        if in_flight and (output.is_empty or len(in_flight) > 2):
            complete(made, in_flight.popleft())
        if not coming and not made.has_unfinished and not in_flight:
            break
    assert all(each.finish_reason == "length" for each in everything)
