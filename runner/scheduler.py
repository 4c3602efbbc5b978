"""Which requests run in a step, and how many of their tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from piecegraph.runner.block_pool import BlockPool, blocks_for
from piecegraph.runner.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    request: Request
    num_tokens: int  # of its uncomputed tokens, in this step
    is_sampled: bool  # its last token runs, so a next one can be drawn


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work: requests with one token first, so that decodes are neighbours."""

    scheduled: tuple[ScheduledRequest, ...]
    finished: tuple[str, ...] = ()  # ids of requests that ended since the last step

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def sampled(self) -> tuple[ScheduledRequest, ...]:
        return tuple(item for item in self.scheduled if item.is_sampled)


class Scheduler:
    """First come, first served. A request is admitted once blocks for its whole length are free, so
    none ever has to give way; a prompt longer than the step's token budget runs in chunks.
    """

    def __init__(self, *, pool: BlockPool, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._finished: list[str] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """The next step's work; admits waiting requests. Empty only if nothing is unfinished."""
        budget = self._max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        for request in self._running:
            if budget == 0:
                break
            scheduled.append(_schedule(request, budget))
            budget -= scheduled[-1].num_tokens
        while self._waiting and budget and len(self._running) < self._max_num_seqs:
            num_blocks = blocks_for(self._waiting[0].max_total_tokens, self._block_size)
            if num_blocks > self._pool.num_free:
                break
            request = self._waiting.popleft()
            request.block_ids = self._pool.allocate(num_blocks)
            self._running.append(request)
            scheduled.append(_schedule(request, budget))
            budget -= scheduled[-1].num_tokens
        scheduled.sort(key=lambda item: item.num_tokens != 1)
        finished: tuple[str, ...] = ()
        if scheduled:  # else nobody would be told
            finished, self._finished = tuple(self._finished), []
        return SchedulerOutput(tuple(scheduled), finished)

    def finish(self, request: Request) -> None:
        """Take `request` off, running or waiting, and free its blocks."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._finished.append(request.request_id)
        self._pool.free(request.block_ids)
        request.block_ids = []


def _schedule(request: Request, budget: int) -> ScheduledRequest:
    num_tokens = min(request.num_uncomputed_tokens, budget)
    return ScheduledRequest(request, num_tokens, is_sampled=num_tokens == request.num_uncomputed_tokens)
