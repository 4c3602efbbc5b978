"""What a decode step of `Scheduler` costs on the host, counted instead of timed: Python calls, and reads of tokens."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.scheduling.scheduler_output import SampledTokens, ScheduledDecodes, SchedulerOutput
from tests.runner.scheduling.make_request import make_request

BLOCK_SIZE = 16


class UnreadTokens(list[int]):
    """Tokens whose number may be asked for; whoever reads or copies them fails."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError("a decode step reads the tokens of a running request")

    __getitem__ = __iter__ = __add__ = __radd__ = __contains__ = copy = _refuse


def decoding(num_reqs: int) -> Scheduler:
    """`num_reqs` requests that have computed a block and a token each, so that the next step needs no block."""
    kv_cache = KVCacheManager(num_blocks=8 * num_reqs, block_size=BLOCK_SIZE, max_num_batched_tokens=64 * num_reqs)
    scheduler = Scheduler(kv_cache=kv_cache, max_num_seqs=num_reqs, max_num_batched_tokens=64 * num_reqs)
    requests = [make_request(str(i), BLOCK_SIZE + 1, 100) for i in range(num_reqs)]
    for request in requests:
        scheduler.add(request)
    output = scheduler.schedule()
    assert len(output.added) == num_reqs
    scheduler.complete_step(output, dict.fromkeys(map(str, range(num_reqs)), 0))
    for request in requests:
        request.prompt_token_ids = UnreadTokens(request.prompt_token_ids)
        request.output_token_ids = UnreadTokens(request.output_token_ids)
    return scheduler


def sampled_tokens(output: SchedulerOutput) -> SampledTokens:
    """As the runner tells them: of a steady decode under the very ids of its output."""
    scheduled = output.scheduled
    ids = scheduled.request_ids if isinstance(scheduled, ScheduledDecodes) else [item.request_id for item in scheduled]
    return SampledTokens(ids, [0] * len(ids))


def num_python_calls(scheduler: Scheduler) -> tuple[int, int]:
    """Python functions called by the next `schedule` and by its `complete_step`."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    try:
        sys.setprofile(profile)
        output = scheduler.schedule()
        sys.setprofile(before)
        scheduling, count = count, 0
        sampled = sampled_tokens(output)
        sys.setprofile(profile)
        scheduler.complete_step(output, sampled)
    finally:
        sys.setprofile(before)
    assert len(sampled) == scheduler.num_running
    return scheduling, count


def test_a_decode_step_calls_no_function_per_request() -> None:
    """256 requests take the calls that 2 take: the loop over them is all there is, and it reads no token."""
    few, many = decoding(2), decoding(256)
    for _ in range(BLOCK_SIZE - 2):  # until the block of each is full
        assert num_python_calls(many) == num_python_calls(few)


def test_new_blocks_cost_no_call_a_request() -> None:
    """Nor does the step in which each of them needs a block."""
    scheduler = decoding(64)
    for request in list(scheduler._running):  # all of them fill a block in the same step
        request.prompt_token_ids, request.output_token_ids = list.copy(request.prompt_token_ids), []
        request.output_token_ids.append(0)
    free_before = scheduler.stats.num_free_blocks
    counts = [num_python_calls(scheduler)[0] for _ in range(3 * BLOCK_SIZE)]
    assert free_before - scheduler.stats.num_free_blocks == 3 * 64
    assert max(counts) < 64
