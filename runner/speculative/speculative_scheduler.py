"""`SpeculativeScheduler`, which gives requests that decode a token each and their drafts to verify."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from piecegraph.runner.scheduling.kv_cache_group import blocks_for
from piecegraph.runner.scheduling.request import NOT_ADMITTED, Request
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.scheduling.scheduler_output import NewBlocks, SchedulerOutput
from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats
from piecegraph.runner.scheduling.speculation_stats import SpeculationStats
from piecegraph.runner.speculative.common.drafting_policy import DraftingPolicy
from piecegraph.runner.speculative.verified_output import VerifiedTokens

REQUEST_KEY = "num_speculative_tokens"
"""The key of `SamplingParams.extra_args` by which a request asks for fewer drafts, 0 for none."""


WORTH_READING = 1.5
"""The tokens that a verification must give a request for a draft model to read on where steps without are measured."""


class SpeculativeScheduler(Scheduler):
    """A scheduler whose steps verify drafts, which the device has made at the end of the step before.

    A request that decodes computes its last token and up to `max_drafts` drafts after it, as many as the budget of
    tokens and the free blocks allow without taking a token or a block from another request. The step decides how many
    tokens it gives, 1 to 1 + drafts; until its result is known, the request's counts of computed and pending tokens are
    those of accepting all of them, and `complete_verification` corrects them. No token after `max_total_tokens` is
    drafted.

    If each step is completed before the next is scheduled (`is_ahead` False), the host knows how many drafts there are:
    no request verifies more, and all have the same number, so that one graph holds the batch (`is_uniform`), or each
    has its own.
    """

    def __init__(
        self,
        *,
        max_drafts: int,
        is_ahead: bool,
        is_uniform: bool,
        num_slots_ahead: int = 0,
        stops_when_slower: bool = False,
        is_synthetic: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        """Start without requests; `options` are those of `Scheduler`.

        `num_slots_ahead`: the slots behind a step's tokens that a draft model writes to before the next step.
        `stops_when_slower`: whether a `DraftingPolicy` decides which steps draft, by steps that are timed with `clock`.
        `is_synthetic`: whether drafts are accepted by given rates, which the counters say.
        """
        super().__init__(**options)
        self._num_slots_ahead = num_slots_ahead
        self._max_drafts = max_drafts
        self._is_synthetic = is_synthetic
        self._is_ahead = is_ahead
        self._is_uniform = is_uniform
        self._may_be_steady = False
        self._policy_of_drafts = DraftingPolicy() if stops_when_slower else None
        self._clock = clock
        self._started: deque[tuple[int, float]] = deque()  # the steps in flight, and when they were scheduled
        self._last_completion = 0.0
        self._drafts_next = self._had_drafts_made = True
        self._is_probe = False  # the step has no drafts, to be measured
        self._stop_epoch = NOT_ADMITTED  # draft model: requests admitted up to here were not drafted for all the time
        self._num_verifications = 0
        self._num_draft_tokens = 0
        self._num_accepted_by_position = [0] * max_drafts

    @property
    def stats(self) -> SchedulerStats:
        """The current counters and gauges."""
        return replace(
            super().stats,
            speculation=SpeculationStats(
                is_synthetic=self._is_synthetic,
                num_verifications=self._num_verifications,
                num_draft_tokens=self._num_draft_tokens,
                num_accepted_tokens=sum(self._num_accepted_by_position),
                num_accepted_by_position=tuple(self._num_accepted_by_position),
                num_stopped_steps=0 if self._policy_of_drafts is None else self._policy_of_drafts.num_stopped_steps,
                stop_reason="" if self._policy_of_drafts is None else self._policy_of_drafts.reason,
            ),
        )

    def schedule(self) -> SchedulerOutput:
        """Return the next step's work, as `Scheduler.schedule` does."""
        policy = self._policy_of_drafts
        if policy is None:
            return super().schedule()
        self._had_drafts_made = self._drafts_next
        self._drafts_next = not self._running or self._should_draft(policy)
        output = super().schedule()
        if output.is_empty:
            return output
        self._started.append((output.step, self._clock()))
        return output if self._drafts_next else replace(output, drafts_next=False)

    def _should_draft(self, policy: DraftingPolicy) -> bool:
        """Return whether running requests are drafted for.

        A draft model has not read what requests wrote while it paused, so it drafts only for those that came later.
        Where drafts are accepted, steps to be measured let it go on reading, so they take its time, too; where few are,
        they are a pause like any other, since requests lose little.
        """
        should_draft = policy.drafts(len(self._running))
        self._is_probe = not should_draft and not policy.reason
        if not self._num_slots_ahead:  # no draft model
            return should_draft
        if self._is_probe and policy.tokens_a_verification >= WORTH_READING:
            return True
        if should_draft and any(request.epoch > self._stop_epoch for request in self._running):
            return True
        self._stop_epoch = self._num_admissions
        return False

    def _time(self, output: SchedulerOutput, verified: Mapping[str, VerifiedTokens]) -> None:
        """Tell the policy how long a step took in which requests decoded and nothing else."""
        assert self._policy_of_drafts is not None
        now, started = self._clock(), 0.0
        while self._started and self._started[0][0] <= output.step:
            _, started = self._started.popleft()
        seconds, self._last_completion = now - max(started, self._last_completion), now
        num_drafts = output.num_drafts
        if output.added or any(item.num_tokens != 1 + num_drafts.get(item.request_id, 0) for item in output.scheduled):
            return
        self._policy_of_drafts.record(
            len(output.scheduled),
            seconds=seconds,
            num_tokens=sum([len(verified[item.request_id].token_ids) for item in output.sampled]),
            num_drafts=sum(num_drafts.values()),
        )

    def complete_verification(
        self, output: SchedulerOutput, verified: Mapping[str, VerifiedTokens]
    ) -> list[tuple[Request, int]]:
        """Take the tokens of a finished step, as `complete_step` does.

        Returns the requests that got tokens, which are now the last of their `output_token_ids`, and how many each got.
        """
        if output.is_empty:
            return []
        self._num_completed_steps += 1
        assert output.step == self._num_completed_steps, (
            f"step {output.step} completed, {self._num_completed_steps} is next: steps complete in order, each once"
        )
        if self._policy_of_drafts is not None:
            self._time(output, verified)
        took: list[tuple[Request, int]] = []
        for request_id, num_tokens, num_computed_tokens, is_sampled, epoch in output.scheduled:
            request = self._requests.get(request_id)
            if request is None or request.epoch != epoch:
                continue  # it has ended; or this is a chunk, and it was preempted and admitted again since
            num_done = num_computed_tokens + num_tokens
            if is_sampled:
                found = verified[request_id]
                self._take(request, found, output.num_drafts.get(request_id, 0))
                took.append((request, len(found.token_ids)))
                num_done = request.num_tokens - 1
            if num_done >= request.next_registration:
                self._kv_cache.register(request, num_done)
        return took

    def _take(self, request: Request, found: VerifiedTokens, num_drafts: int) -> None:
        """Add the tokens of a step that verified `num_drafts` drafts, and count those that it rejected out again."""
        request.settled_output_token_ids += found.token_ids
        num_rejected = num_drafts + 1 - len(found.token_ids)
        request.settled_num_tokens_with_pending -= num_rejected
        if request.num_unverified_tokens:  # else it verified none, or was preempted and counts no token as computed
            request.num_unverified_tokens -= num_drafts
            request.settled_num_computed_tokens -= num_rejected
        request.num_ready_drafts = found.num_next_drafts
        if found.num_drafts:
            self._num_verifications += 1
            self._num_draft_tokens += found.num_drafts
            for position in range(len(found.token_ids) - 1):
                self._num_accepted_by_position[position] += 1

    def _extend(self, request: Request, num_tokens: int, new_blocks: list[NewBlocks]) -> bool:
        """Allocate blocks for `num_tokens` of a running request, and for drafts behind them if blocks are left over.

        A block is left free for each running request. Returns False if `request` itself was preempted.
        """
        kv_cache, needed = self._kv_cache, request.num_computed_tokens + num_tokens
        wanted = max(needed, min(needed + self._num_slots_ahead, request.max_total_tokens - 1))
        num_new = blocks_for(wanted, kv_cache.block_size) - request.num_slots // kv_cache.block_size
        num_spared = len(self._running) if wanted > needed else 0
        if num_new > 0 and (num_new + num_spared) * len(kv_cache.groups) <= kv_cache.num_free_blocks:
            added = kv_cache.extend(request, num_tokens + wanted - needed)
            assert added is not None, "counted"
            new_blocks += added
            return True
        return needed <= request.num_slots or super()._extend(request, num_tokens, new_blocks)

    def _draft_budget(self) -> int:
        """Return how many drafts this step may verify: what running requests leave of the budget of tokens."""
        if not self._verifies():
            return 0
        if not self._is_ahead and not any(request.num_ready_drafts for request in self._running):
            return 0
        wanted = sum(
            [request.settled_num_tokens_with_pending - request.settled_num_computed_tokens for request in self._running]
        )
        return max(0, self._max_num_batched_tokens - wanted)

    def _verifies(self) -> bool:
        """Return whether this step verifies drafts: the step before had them made, and no measure is taken without."""
        policy = self._policy_of_drafts
        return policy is None or (self._had_drafts_made and self._drafts_next and not self._is_probe)

    def _num_drafts(self, request: Request, budget: int) -> int:
        """Return how many of the `budget` drafts this step verifies for a running request that computes one token."""
        num_computed = request.settled_num_computed_tokens
        if num_computed < request.num_admitted_tokens or request.epoch <= self._stop_epoch:
            return 0  # the end of its prompt, which no step has sampled after; or a draft model has paused for it
        wanted = self._max_drafts if self._is_ahead or self._is_uniform else request.num_ready_drafts
        asked: int = (request.sampling_params.extra_args or {}).get(REQUEST_KEY, wanted)
        left = request.max_total_tokens - request.settled_num_tokens_with_pending - 1
        count = min(wanted, asked, left, budget)
        num_blocks = blocks_for(num_computed + 1 + count, self._kv_cache.block_size)
        num_new = num_blocks - request.num_slots // self._kv_cache.block_size
        if num_new > 0 and num_new * len(self._kv_cache.groups) > self._kv_cache.num_free_blocks:
            count = min(count, request.num_slots - num_computed - 1)
        return max(0, count)
