"""`PipelineScheduler`, which keeps several batches in flight, one a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats


class PipelineScheduler(Scheduler):
    """A scheduler for several stages: a request computes no token that it has not received yet.

    While a batch is in flight, the next one is made of other requests. A step takes at most as many running requests as
    their number divided by the number of stages, those admitted earlier first, so that each stage has a batch of its
    own. Once every stage but one has such a full batch, the next step takes all requests that are left, so none waits
    for ever.

    A prompt that runs in chunks has the tokens of its next chunk, and may be in several batches in flight.

    A place for a batch that stays empty because no unfinished request has a token to compute is a bubble, which `stats`
    counts. One request alone keeps one stage busy at a time; of N stages, N - 1 have a bubble in each of its steps.
    """

    def __init__(self, *, num_stages: int, **options: Any) -> None:
        super().__init__(**options)
        assert num_stages > 1, num_stages
        self._num_stages = num_stages
        self._may_be_steady = False  # a steady batch computes tokens that are pending
        self._num_bubbles = 0

    @property
    def stats(self) -> SchedulerStats:
        """The counters and gauges, bubbles included."""
        return replace(super().stats, num_pipeline_steps=self._num_steps, num_bubbles=self._num_bubbles)

    def schedule(self) -> SchedulerOutput:
        """Return the next step's work, which is empty if no request can run before a step in flight is completed."""
        output = super().schedule()
        if output.is_empty and self._requests:
            self._num_bubbles += self._num_stages - (self._num_steps - self._num_completed_steps)
        return output

    def _shares_of_budget(self) -> Mapping[str, int]:
        """Return how many tokens each request of the next batch computes; a request that is missing waits."""
        budget = self._max_num_batched_tokens
        places = -(-len(self._running) // self._num_stages)
        shares: dict[str, int] = {}
        for request in sorted(self._running, key=attrgetter("epoch")):
            if not places or not budget:
                break
            num_tokens = request.settled_num_tokens_with_pending
            if num_tokens != request.num_tokens or num_tokens >= request.max_total_tokens:
                continue  # its token is in flight, or it has all
            num_tokens -= request.settled_num_computed_tokens
            if num_tokens != 1:
                num_tokens = self._take_share(request, num_tokens, budget)
            num_tokens = min(num_tokens, budget)
            if num_tokens:
                shares[request.request_id] = num_tokens
                budget -= num_tokens
                places -= 1
        return shares
