"""The scheduler: it decides which requests run in a step, and how many tokens of each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic

from piecegraph.errors import RequestError
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request import NEVER, Request
from piecegraph.runner.scheduling.request_queue import RequestQueue, SchedulingPolicy
from piecegraph.runner.scheduling.scheduler_output import (
    AddedRequest,
    NewBlocks,
    SampledTokens,
    ScheduledDecodes,
    ScheduledRequest,
    SchedulerOutput,
)
from piecegraph.runner.scheduling.speculation_stats import SpeculationStats
from piecegraph.runner.scheduling.steady_decode import SteadyDecode

REGISTRATION_INTERVAL = 64
"""Steps after which requests that decode steadily register the blocks they have filled.

No block is looked up in a steady decode, and its end registers them first, so this only bounds the work at its end.
"""

NO_DRAFTS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start, and gauges, which are marked "now"."""

    num_running: int  # now
    num_waiting: int  # now
    num_free_blocks: int  # now; cached blocks without references are free
    num_blocks: int
    num_prefix_queries: int  # tokens of requests when first admitted
    num_prefix_hits: int  # of those, found in the cache
    num_preemptions: int
    speculation: SpeculationStats | None = None  # None: no speculative decoding


class Scheduler:
    """The scheduler of requests over a budget of tokens a step.

    The budget is spent on running requests first, in the order of their admission, and then on waiting requests in
    the order of `policy`; a prompt longer than the remaining budget runs in chunks, mixed with decodes. So `policy`
    orders the queue and decides which request is preempted when blocks are short. It takes nothing else from a running
    request: neither its place among `max_num_seqs` nor its tokens of a step.

    The design follows vLLM's V1 scheduler. Preemption is completion and resumption a fresh add, as in its Model Runner
    V2: a preempted request loses its blocks and its row, waits at its old place, and is added again with all its known
    tokens.

    `schedule` may be called before the tokens of earlier steps are known. A request then computes a token that is
    pending: sampled, but known to the device only. `complete_step` takes the tokens, in the order of scheduling.

    Note [one stream]: steps run on the device one after the other, in the order they were scheduled. So a block
    may be given to another request while a step in flight still uses it. A block of a prompt is found in the prefix
    cache from the moment the step that fills it is being scheduled, also by other requests of that step: each layer
    writes the keys and values of all requests with several tokens before any request attends. (A request with one
    token may write its key and value as it attends, so a block that such a token fills is found in later steps only.)
    Prompts that arrive together and share a prefix compute it once.
    """

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulingPolicy = SchedulingPolicy.FCFS,
        watermark: float = 0.01,
        prompt_logprobs_chunk: int = 512,
    ) -> None:
        """Start without requests.

        `watermark`: the fraction of the blocks that admission leaves free while any request runs.
        `prompt_logprobs_chunk`: the largest number of prompt tokens, over all requests of a step, for which a step
        computes prompt log probabilities; each takes a row of logits.
        """
        assert max_num_seqs >= 1 and max_num_batched_tokens >= 1 and prompt_logprobs_chunk >= 1
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._policy = policy
        self._num_spared_blocks = int(watermark * kv_cache.num_blocks)
        self._prompt_logprobs_chunk = prompt_logprobs_chunk
        self._prompt_logprobs_left = prompt_logprobs_chunk  # in this step

        self._requests: dict[str, Request] = {}  # all unfinished
        self._waiting = RequestQueue(policy)
        self._running: list[Request] = []  # in the order of `policy`; `epoch` is the order of admission
        self._steady: SteadyDecode | None = None  # the running requests that draw tokens; None: loop over all
        self._removed: list[str] = []
        self._num_admissions = 0
        self._num_steps = 0
        self._num_completed_steps = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._num_preemptions = 0
        self._may_be_steady = True  # False: requests never form a `SteadyDecode`

    @property
    def num_running(self) -> int:
        """The number of running requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """True if a request runs or waits."""
        return bool(self._requests)

    @property
    def stats(self) -> SchedulerStats:
        """The current counters and gauges."""
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_blocks=self._kv_cache.num_free_blocks,
            num_blocks=self._kv_cache.num_blocks,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
            num_preemptions=self._num_preemptions,
        )

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at any one time."""
        return self._kv_cache.blocks_needed(num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return True if a request of `num_tokens` in total can run alone; the engine refuses one that cannot."""
        return self._kv_cache.can_ever_fit(num_tokens)

    def add(self, request: Request) -> None:
        """Queue a new request. Raises RequestError if an unfinished request has its id."""
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id={request.request_id!r} is in use by an unfinished request; choose another, or abort that."
            )
        num_prompt, num_total = request.num_prompt_tokens, request.max_total_tokens
        assert 0 < num_prompt < num_total, f"{num_prompt} tokens of prompt, {num_total} in all: nothing to generate"
        assert self.can_ever_fit(num_total), f"{num_total} tokens fit no empty cache; the engine refuses such requests"
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> Request | None:
        """End a request, running or waiting, in a step in flight or not.

        Returns the request, or None if none has that id (it may just have ended). Its blocks are free at once, see
        Note [one stream]; tokens that steps in flight sample for it are dropped.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            if self._steady is not None and request.batched_by is self._steady:
                self._steady.drop(request)
                self._register_decoded(request)
            self._leave(request)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request that its caller cancels, as `finish` does."""
        return self.finish(request_id, "abort")

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, for instance because the weights have changed."""
        self._kv_cache.reset_prefix_cache()

    def schedule(self) -> SchedulerOutput:
        """Return the next step's work.

        The work is empty if nothing can run before a step in flight is completed, or nothing is unfinished. While the
        same requests decode and no other can be admitted, the cost of a step is that of its changes: the added blocks.
        """
        if (steady := self._steady) is not None:
            decodes_only = None if self._can_admit else self._schedule_steady(steady)
            if decodes_only is not None:
                return decodes_only
            self._end_steady()
        budget = self._max_num_batched_tokens
        self._prompt_logprobs_left = self._prompt_logprobs_chunk
        decodes: list[ScheduledRequest] = []
        verifications: list[ScheduledRequest] = []  # of drafts
        num_drafts: dict[str, int] = {}
        others: list[ScheduledRequest] = []
        new_blocks: list[NewBlocks] = []
        num_preemptions = self._num_preemptions
        shares = self._shares_of_budget()
        draft_budget = self._draft_budget()
        make = tuple.__new__  # half the cost of ScheduledRequest(...)
        # A preempted request is the last of the list, hence not scheduled yet: the loop stops at the list's new end.
        for request in self._running:
            if not budget:
                break
            num_with_pending = request.settled_num_tokens_with_pending
            if num_with_pending >= request.max_total_tokens:
                continue  # all its tokens are known or pending
            num_computed = request.settled_num_computed_tokens
            num_uncomputed = num_tokens = num_with_pending - num_computed
            if shares is not None:
                num_tokens = shares.get(request.request_id, 0)
            elif num_tokens != 1:
                num_tokens = self._take_share(request, num_uncomputed, budget)
            if not num_tokens:
                continue  # its turn is another step's
            if draft_budget and num_uncomputed == 1 and (drafts := self._num_drafts(request, draft_budget)):
                num_drafts[request.request_id] = drafts
                request.num_unverified_tokens += drafts
                draft_budget -= drafts
                num_with_pending += drafts
                num_uncomputed = num_tokens = 1 + drafts
            num_computed_after = num_computed + num_tokens
            if num_computed_after > request.num_slots and not self._extend(request, num_tokens, new_blocks):
                break  # it was the last, and was preempted itself
            request.settled_num_computed_tokens = num_computed_after
            is_sampled = num_tokens == num_uncomputed
            if is_sampled:
                request.settled_num_tokens_with_pending = num_with_pending + 1
            budget -= num_tokens
            item = make(ScheduledRequest, (request.request_id, num_tokens, num_computed, is_sampled, request.epoch))
            if num_tokens == 1:
                decodes.append(item)
            elif request.request_id in num_drafts:
                verifications.append(item)
            else:
                others.append(item)
                self._kv_cache.register(request, num_computed_after)

        # After a preemption running requests need the blocks.
        added = self._admit_all(budget, decodes, others) if self._num_preemptions == num_preemptions else ()
        if not (decodes or verifications or others):
            return SchedulerOutput(step=self._num_steps)
        # The longest first: attention's programs start in this order, and the last to start should be short.
        lengths = [item.num_computed_tokens for item in decodes]
        ranks = sorted(range(len(decodes)), key=lengths.__getitem__, reverse=True)
        decodes = [decodes[rank] for rank in ranks]
        # With budget left and no preemption, the loop has seen all running requests; others have all their tokens.
        is_decode_only = budget and not (others or added) and self._num_preemptions == num_preemptions
        if (
            is_decode_only
            and self._may_be_steady
            and not self._can_admit
            and sum([item.is_sampled for item in decodes]) == len(decodes)
        ):
            self._steady = SteadyDecode([self._requests[item.request_id] for item in decodes], ranks)
        scheduled = (*decodes, *verifications, *others)
        return self._output(scheduled, added=added, new_blocks=tuple(new_blocks), num_drafts=num_drafts)

    def complete_step(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> Sequence[Request]:
        """Take the tokens of a finished step, one for each request of `output.sampled`.

        Steps complete in the order of scheduling, each once; empty steps may be left out. Returns the requests
        that got a token, now the last of their `output_token_ids`; the engine finishes those that end with it
        before it schedules again. Tokens of requests that have ended meanwhile are dropped. Tokens of preempted
        requests are kept: they are valid, and are computed again with the rest. `SampledTokens` of `ScheduledDecodes`
        are taken without a loop over requests; steps of the same requests return the same list.
        """
        if output.is_empty:
            return []
        self._num_completed_steps += 1
        assert output.step == self._num_completed_steps, (
            f"step {output.step} completed, {self._num_completed_steps} is next: steps complete in order, each once"
        )
        scheduled, steady = output.scheduled, self._steady
        if isinstance(sampled, SampledTokens):
            if (
                isinstance(scheduled, ScheduledDecodes)
                and steady is not None
                and steady.request_ids is scheduled.request_ids is sampled.request_ids
            ):
                return self._complete_steady(steady, sampled)
            sampled = sampled.as_dict()
        if steady is not None:
            steady.settle()  # the tokens of this step come after those of earlier ones
        took = []
        for request_id, num_tokens, num_computed_tokens, is_sampled, epoch in scheduled:
            request = self._requests.get(request_id)
            if request is None or request.epoch != epoch:
                continue  # ended meanwhile, or (a chunk only) preempted and admitted again
            if is_sampled:
                request.settled_output_token_ids.append(sampled[request_id])
                took.append(request)
            # Not `request.num_computed_tokens`, which steps in flight have advanced. Preempted ones never get here.
            num_done = num_computed_tokens + num_tokens
            if num_done >= request.next_registration:
                self._kv_cache.register(request, num_done)
        return took

    def start_over(self, requests: Sequence[Request]) -> None:
        """Restart after a failed step: the results of steps in flight are lost.

        `requests` are all unfinished requests. Only their parameters and their known tokens are relied on: an
        exception may have left everything else half changed, also one in an earlier call of this method. Each request
        is computed anew, and no known token is lost. Cached prefixes are forgotten: a window may have named blocks of
        the failed step.
        """
        for request in requests:
            if request.batched_by is not None:
                request.batched_by.settle()
                request.batched_by = None
        self._kv_cache.start_over()
        self._steady, self._running, self._waiting = None, [], RequestQueue(self._policy)
        self._requests = {}
        for request in requests:
            if request.num_computed_tokens:
                self._removed.append(request.request_id)
                self._num_preemptions += 1
                request.num_preemptions += 1
                request.num_computed_tokens = 0
            request.num_tokens_with_pending = request.num_tokens
            request.num_unverified_tokens = 0
            request.num_slots, request.next_registration = 0, NEVER
            self._requests[request.request_id] = request
            self._waiting.add(request)
        self._num_completed_steps = self._num_steps

    @property
    def _can_admit(self) -> bool:
        """True if a request waits and fits into `max_num_seqs`; it may still lack blocks."""
        return len(self._waiting) > 0 and len(self._running) < self._max_num_seqs

    def _output(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        added: tuple[AddedRequest, ...] = (),
        new_blocks: tuple[NewBlocks, ...] = (),
        num_drafts: Mapping[str, int] = NO_DRAFTS,
    ) -> SchedulerOutput:
        self._num_steps += 1
        removed, self._removed = self._removed, []
        return SchedulerOutput(
            step=self._num_steps,
            scheduled=scheduled,
            added=added,
            new_blocks=new_blocks,
            removed=tuple(removed),
            num_drafts=num_drafts,
        )

    def _draft_budget(self) -> int:
        """Return how many drafts this step may verify, over all requests; 0 without speculative decoding."""
        return 0

    def _num_drafts(self, request: Request, budget: int) -> int:
        """Return how many of the `budget` drafts this step verifies for a running request that computes one token."""
        return 0

    def _schedule_steady(self, steady: SteadyDecode) -> SchedulerOutput | None:
        """Schedule a token of each request; if one would have to be preempted, change nothing and return None."""
        steady.drop_complete()
        if not 0 < len(steady) <= self._max_num_batched_tokens:
            return None
        places = steady.without_slot()
        new_blocks = self._kv_cache.extend_each([steady.requests[place] for place in places]) if places else ()
        if new_blocks is None:
            return None
        steady.update_slots(places)
        return self._output(steady.advance(), new_blocks=tuple(new_blocks))

    def _complete_steady(self, steady: SteadyDecode, sampled: SampledTokens) -> Sequence[Request]:
        steady.append(sampled.token_ids)
        if self._num_completed_steps % REGISTRATION_INTERVAL == 0:
            for request in steady.requests:
                self._register_decoded(request)
        return steady.requests

    def _end_steady(self) -> None:
        """Leave the steady decode: from now on, steps loop over requests. Idempotent."""
        steady, self._steady = self._steady, None
        if steady is not None:
            steady.dissolve()
            for request in steady.requests:
                self._register_decoded(request)

    def _register_decoded(self, request: Request) -> None:
        """Register the blocks that completed steps have filled: all known tokens of a decode but the last."""
        self._kv_cache.register(request, request.num_tokens - 1)

    def _shares_of_budget(self) -> Mapping[str, int] | None:
        """Return how many tokens each running request may compute in this step; None: all that it lacks."""
        budget = self._max_num_batched_tokens
        wanted = sum(
            [request.settled_num_tokens_with_pending - request.settled_num_computed_tokens for request in self._running]
        )
        if wanted <= min(budget, self._prompt_logprobs_left):
            return None
        shares = {}
        for request in sorted(self._running, key=attrgetter("epoch")):
            if request.settled_num_tokens_with_pending >= request.max_total_tokens:
                continue
            num_tokens = request.settled_num_tokens_with_pending - request.settled_num_computed_tokens
            if num_tokens != 1:
                num_tokens = self._take_share(request, num_tokens, budget)
            num_tokens = shares[request.request_id] = min(num_tokens, budget)
            budget -= num_tokens
        return shares

    def _take_share(self, request: Request, num_uncomputed: int, budget: int) -> int:
        """Return how many tokens of `request` a step with `budget` left computes; 0: it has to wait for another step.

        Counts prompt log probabilities against their budget of the step.
        """
        num_tokens = min(num_uncomputed, budget)
        is_in_prompt = request.num_computed_tokens < request.num_prompt_tokens
        # The last token of a prompt gives no log probability of the prompt: alone it takes no row.
        if request.wants_prompt_logprobs and is_in_prompt and num_uncomputed > 1:
            num_tokens = min(num_tokens, self._prompt_logprobs_left)
            self._prompt_logprobs_left -= num_tokens
        return num_tokens

    def _extend(self, request: Request, num_tokens: int, new_blocks: list[NewBlocks]) -> bool:
        """Allocate blocks for `num_tokens` of a running request, preempting from the end of the running requests.

        Returns False if `request` itself was preempted.
        """
        while (added := self._kv_cache.extend(request, num_tokens)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        new_blocks += added
        return True

    def _preempt(self, request: Request) -> None:
        """Return a request to the queue, without blocks. Its pending tokens stay valid: `_admit` waits for them."""
        self._end_steady()
        self._leave(request)
        self._num_preemptions += 1
        request.num_preemptions += 1
        request.num_computed_tokens = request.num_unverified_tokens = 0
        self._waiting.add(request)

    def _leave(self, request: Request) -> None:
        self._removed.append(request.request_id)
        self._kv_cache.free(request)

    def _admit_all(
        self, budget: int, decodes: list[ScheduledRequest], others: list[ScheduledRequest]
    ) -> tuple[AddedRequest, ...]:
        """Admit waiting requests while they fit, and append their parts of the step to the lists."""
        added: list[AddedRequest] = []
        while budget and self._can_admit:
            admitted = self._admit(budget)
            if admitted is None:
                break
            added.append(admitted[0])
            budget -= admitted[1].num_tokens
            (decodes if admitted[1].num_tokens == 1 else others).append(admitted[1])
        return tuple(added)

    def _admit(self, budget: int) -> tuple[AddedRequest, ScheduledRequest] | None:
        """Admit the first waiting request, or return None if it cannot run now; no other request overtakes it."""
        request = self._waiting.peek()
        num_known = request.num_tokens
        if request.num_tokens_with_pending != num_known or num_known >= request.max_total_tokens:
            return None  # preempted with tokens in flight, or its last token has just become known
        hit = self._kv_cache.find_prefix(request)
        num_uncomputed = num_known - hit.num_tokens
        num_tokens = self._take_share(request, num_uncomputed, budget)
        if not num_tokens:
            return None
        num_spared_blocks = self._num_spared_blocks if self._running else 0
        if not self._kv_cache.admit(request, hit, num_tokens, num_spared_blocks=num_spared_blocks):
            assert self._running, f"{request.request_id!r} does not fit an empty cache; see can_ever_fit"
            return None
        self._waiting.pop()
        insort(self._running, request, key=self._policy.key)
        self._num_admissions += 1
        request.epoch, request.num_admitted_tokens = self._num_admissions, num_known
        if not request.num_preemptions:
            request.num_cached_tokens = hit.num_tokens
            request.scheduled_ts = monotonic()
            self._num_prefix_queries += num_known
            self._num_prefix_hits += hit.num_tokens
        added = AddedRequest(
            request_id=request.request_id,
            token_ids=request.token_ids(0, num_known) if request.output_token_ids else request.prompt_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=hit.num_tokens,
            block_ids=self._kv_cache.block_ids(request),
            sampling_params=request.sampling_params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            bad_words=request.bad_words,
            prompt_embeds=request.prompt_embeds,
        )
        is_sampled = num_tokens == num_uncomputed
        item = ScheduledRequest(request.request_id, num_tokens, hit.num_tokens, is_sampled, request.epoch)
        request.num_computed_tokens = hit.num_tokens + num_tokens
        if num_tokens != 1:
            self._kv_cache.register(request, request.num_computed_tokens)
        request.num_tokens_with_pending += is_sampled
        return added, item
