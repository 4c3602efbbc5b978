"""The scheduler: it decides which requests run in a step, and how many tokens of each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from operator import attrgetter
from time import monotonic

from piecegraph.errors import RequestError
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.lora_slots import LoraSlots, WaitingAdapters
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
from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats
from piecegraph.runner.scheduling.steady_decode import SteadyDecode

REGISTRATION_INTERVAL = 64
"""The number of steps after which requests of a `SteadyDecode` register the blocks that they have filled.

Nothing looks for a cached prefix during a steady decode, and its end registers all filled blocks. So this number only
bounds the work at the end.
"""

NO_DRAFTS: Mapping[str, int] = {}
"""The drafts of a step without speculative decoding."""


class Scheduler:
    """The scheduler of requests, which spends a budget of tokens in each step.

    The budget goes to running requests first. If it does not suffice for all of them, those that were admitted earlier
    come first. What is left goes to waiting requests in the order of `policy`. A prompt longer than the remaining
    budget runs in chunks, mixed with decodes. So `policy` orders the queue, and decides which request is preempted when
    blocks are short. Otherwise a waiting request of higher priority takes nothing from a running one: neither its place
    among `max_num_seqs` nor its part of the budget.

    The design follows vLLM's V1 scheduler. Preemption and resumption are like the end of one request and the arrival of
    another, as in vLLM's Model Runner V2: a preempted request loses its blocks and its row of device state, returns to
    its old place in the queue, and is added again with all its known tokens.

    `schedule` may be called before the tokens of earlier steps are known. A request then computes a token that is
    pending: sampled, but known only to the device. `complete_step` receives the tokens of the steps, in the order in
    which the steps were scheduled.

    Note [one stream]: steps run on the device one after the other, in the order they were scheduled. So a block may be
    given to another request while a step in flight still uses it. A block of a prompt can be found in the prefix cache
    as soon as the step that fills it is being scheduled, also by other requests of that step: in each layer, the keys
    and values of all requests with several tokens are written before any request attends. So prompts that arrive
    together and share a prefix compute it once. A request with one token may write its key and value while it attends;
    a block that such a token fills is found in later steps only.
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
        lora_slots: LoraSlots | None = None,
    ) -> None:
        """Start without requests.

        `max_num_seqs`: the largest number of running requests. `max_num_batched_tokens`: the largest number of tokens
        in a step. `watermark`: the fraction of the blocks that admission leaves free while any request runs.
        `prompt_logprobs_chunk`: the largest number of prompt tokens, over all requests, for which one step computes
        prompt log probabilities; each of these tokens needs a row of logits. `lora_slots`: where adapters lie; None: no
        request has one.
        """
        assert max_num_seqs >= 1 and max_num_batched_tokens >= 1 and prompt_logprobs_chunk >= 1
        self._kv_cache = kv_cache
        self._lora_slots = lora_slots
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._policy = policy
        self._watermark_blocks = int(watermark * kv_cache.num_blocks)
        self._prompt_logprobs_chunk = prompt_logprobs_chunk
        self._prompt_logprobs_left = prompt_logprobs_chunk  # of the chunk, in the step that is being scheduled

        self._requests: dict[str, Request] = {}  # all unfinished ones, running or waiting, by id
        self._waiting = RequestQueue(policy)
        self._running: list[Request] = []  # in the order of `policy`; `Request.epoch` has the order of admission
        self._steady: SteadyDecode | None = None  # requests that can be scheduled without a loop; None: loop over all
        self._removed: list[str] = []  # ids for the next `SchedulerOutput.removed`
        self._grown: dict[str, Request] = {}  # running ones whose rows on the device lack known tokens
        self._num_admissions = 0
        self._num_steps = 0
        self._num_completed_steps = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._num_preemptions = 0
        self._may_be_steady = True  # False, in a subclass: requests never form a `SteadyDecode`
        self._num_slots_ahead = 0  # slots that `_extend`, in a subclass, adds behind the tokens of a step if it can

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
        """Return the largest number of blocks that a request of `num_tokens` in total holds at any time."""
        return self._kv_cache.blocks_needed(num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return whether a request of `num_tokens` in total can run if no other runs; else it must not be added."""
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
        """End a running or waiting request and return it; return None if no unfinished request has that id.

        Its blocks are free at once, even if a step in flight uses them: see Note [one stream]. Tokens that steps in
        flight sample for it are dropped.
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
        """End a request that its caller cancels, as `finish` does with the reason "abort"."""
        return self.finish(request_id, "abort")

    def can_append(self, request: Request) -> bool:
        """Return whether known tokens may be appended to an unfinished request: it must be running."""
        return self._requests.get(request.request_id) is request and request not in self._waiting

    def begin_append(self, request: Request) -> None:
        """Prepare a running request for tokens that no step has drawn; call `end_append` after them.

        What steps in flight draw for it is dropped, as if it had been admitted again: they compute its present last
        token, and what they draw from it is among those that are appended.
        """
        self._end_steady()
        self._num_admissions += 1
        request.epoch = self._num_admissions

    def end_append(self, request: Request) -> None:
        """Have the next step that computes a request give the device all its known tokens. The request is unfinished.

        Its row on the device is removed and added, as for a request that is preempted and admitted again; its blocks
        stay.
        """
        request.num_tokens_with_pending = request.num_admitted_tokens = request.num_tokens
        self._grown[request.request_id] = request

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, for instance because the weights have changed."""
        self._kv_cache.reset_prefix_cache()

    def schedule(self) -> SchedulerOutput:
        """Return the next step's work.

        The output is empty if no request can run, or if none can before a step in flight is completed. While the same
        requests decode and no other can be admitted (`SteadyDecode`), this loops only over those that need a block.
        """
        if (steady := self._steady) is not None:
            steady_output = None if self._can_admit else self._schedule_steady(steady)
            if steady_output is not None:
                return steady_output
            self._end_steady()
        budget = self._max_num_batched_tokens
        self._prompt_logprobs_left = self._prompt_logprobs_chunk
        decodes: list[ScheduledRequest] = []
        verifications: list[ScheduledRequest] = []  # the last token of a request, and its drafts
        num_drafts: dict[str, int] = {}  # by the ids in `verifications`
        others: list[ScheduledRequest] = []  # prompts and their chunks, and requests that were preempted
        new_blocks: list[NewBlocks] = []
        num_preemptions_before = self._num_preemptions
        shares = self._shares_of_budget()
        draft_budget = self._draft_budget()
        make = tuple.__new__  # half the cost of ScheduledRequest(...)
        # `_extend` may preempt: it removes requests from the end of this list, which the loop has not reached yet.
        for request in self._running:
            if not budget:
                break
            num_with_pending = request.settled_num_tokens_with_pending
            if num_with_pending >= request.max_total_tokens:
                continue  # its last token is known or pending: nothing is left to compute
            num_computed = request.settled_num_computed_tokens
            num_uncomputed = num_tokens = num_with_pending - num_computed
            if shares is not None:
                num_tokens = shares.get(request.request_id, 0)
            elif num_tokens != 1:
                num_tokens = self._take_share(request, num_uncomputed, budget)
            if not num_tokens:
                continue  # the budget has no token for it in this step
            if draft_budget and num_uncomputed == 1 and (drafts := self._num_drafts(request, draft_budget)):
                num_drafts[request.request_id] = drafts
                request.num_unverified_tokens += drafts
                draft_budget -= drafts
                num_with_pending += drafts
                num_uncomputed = num_tokens = 1 + drafts
            num_computed_after = num_computed + num_tokens
            num_slots = num_computed_after + self._num_slots_ahead
            if num_slots > request.num_slots and not self._extend(request, num_tokens, new_blocks):
                break  # it was preempted itself, because it was the last of the running requests
            request.settled_num_computed_tokens = num_computed_after
            is_sampled = num_tokens == num_uncomputed  # else this is a chunk, after which nothing is sampled
            request.settled_num_tokens_with_pending = num_with_pending + is_sampled
            budget -= num_tokens
            item = make(ScheduledRequest, (request.request_id, num_tokens, num_computed, is_sampled, request.epoch))
            if num_tokens == 1:
                decodes.append(item)
            elif request.request_id in num_drafts:
                verifications.append(item)
            else:
                others.append(item)
                self._kv_cache.register(request, num_computed_after)

        has_preempted = self._num_preemptions != num_preemptions_before
        # After a preemption nothing is admitted: the running requests need the blocks.
        added = () if has_preempted else self._admit_all(budget, decodes, others)
        if not (decodes or verifications or others):
            return SchedulerOutput(step=self._num_steps)
        # Longest contexts first: the attention kernel starts programs in this order, and the last ones should be short.
        lengths = [item.num_computed_tokens for item in decodes]
        ranks = sorted(range(len(decodes)), key=lengths.__getitem__, reverse=True)
        decodes = [decodes[rank] for rank in ranks]
        # With budget left and no preemption, the loop has skipped only requests that have all their tokens.
        is_decode_only = budget > 0 and not (others or added or has_preempted or self._grown)
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
        """Take the tokens of a finished step, one for each request of `output.sampled`, by request id.

        Steps complete in the order of scheduling, each once; empty steps may be left out. Returns the requests that got
        a token, which is now the last of their `output_token_ids`. The caller finishes those that end with that token
        before it schedules again. Tokens of requests that have ended meanwhile are dropped. Tokens of requests that
        were preempted meanwhile are kept: they are valid, and their keys and values are computed again with the rest.
        The `SampledTokens` of a step of a `SteadyDecode` are taken without a loop over requests; while the requests
        stay the same, each call returns the same list object.
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
            steady.settle()  # first the tokens of earlier steps, so that those of this step come after them
        took = []
        for request_id, num_tokens, num_computed_tokens, is_sampled, epoch in scheduled:
            request = self._requests.get(request_id)
            if request is None or request.epoch != epoch:
                continue  # it has ended; or this is a chunk, and it was preempted and admitted again since
            if is_sampled:
                request.settled_output_token_ids.append(sampled[request_id])
                took.append(request)
            # Later steps in flight have advanced `request.num_computed_tokens`, so it is not used here. A preempted
            # request holds no blocks, and its `next_registration` is never reached.
            num_done = num_computed_tokens + num_tokens
            if num_done >= request.next_registration:
                self._kv_cache.register(request, num_done)
        return took

    def start_over(self, requests: Sequence[Request]) -> None:
        """Restart after a failed step: the results of steps in flight are lost.

        `requests` are all unfinished requests. Only their parameters and known tokens are used, because an exception,
        also one in an earlier call of this method, may have left everything else half changed. Each request is computed
        again from its start, and no known token is lost. Cached prefixes are discarded: blocks of the failed step may
        be registered although their keys and values were never written.
        """
        for request in requests:
            if request.batched_by is not None:
                request.batched_by.settle()
                request.batched_by = None
        self._kv_cache.start_over()
        if self._lora_slots is not None:
            self._lora_slots.start_over()
        self._steady, self._running, self._waiting = None, [], RequestQueue(self._policy)
        self._requests, self._grown = {}, {}
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
        """Whether a request waits and `max_num_seqs` has room for it; blocks may still be short."""
        return len(self._waiting) > 0 and len(self._running) < self._max_num_seqs

    def _output(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        added: tuple[AddedRequest, ...] = (),
        new_blocks: tuple[NewBlocks, ...] = (),
        num_drafts: Mapping[str, int] = NO_DRAFTS,
    ) -> SchedulerOutput:
        """Return the output of a new step, with the ids that were removed since the preceding one."""
        self._num_steps += 1
        if self._grown:
            grown = self._add_grown(scheduled)
            ids = {one.request_id for one in grown}
            added = (*grown, *added)
            new_blocks = tuple([one for one in new_blocks if one.request_id not in ids])  # they come with `grown`
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
        """Schedule one token of each request of `steady`.

        Returns None, with nothing scheduled, if none is left, if the budget is too small, or if blocks are short.
        """
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
        """Take the tokens of a step of exactly the requests of `steady`, and return these requests."""
        steady.append(sampled.token_ids)
        if self._num_completed_steps % REGISTRATION_INTERVAL == 0:
            for request in steady.requests:
                self._register_decoded(request)
        return steady.requests

    def _end_steady(self) -> None:
        """Leave the steady decode: the next step loops over all running requests. Idempotent."""
        steady, self._steady = self._steady, None
        if steady is not None:
            steady.dissolve()
            for request in steady.requests:
                self._register_decoded(request)

    def _register_decoded(self, request: Request) -> None:
        """Register the blocks that completed steps of a decode have filled: those of all known tokens but the last."""
        self._kv_cache.register(request, request.num_tokens - 1)

    def _shares_of_budget(self) -> Mapping[str, int] | None:
        """Return how many tokens each running request computes in this step, or None if the budget suffices for all.

        If it does not, requests that were admitted earlier come first.
        Prompt log probabilities count as in `_take_share`.
        """
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
        """Return how many tokens of `request` this step computes, `budget` at most; 0: it waits for another step.

        If the request wants prompt log probabilities, takes them from the number that the step has left.
        """
        num_tokens = min(num_uncomputed, budget)
        is_in_prompt = request.num_computed_tokens < request.num_prompt_tokens
        # The last token of a prompt gives no log probability of a prompt token, so by itself it needs no row of logits.
        if request.wants_prompt_logprobs and is_in_prompt and num_uncomputed > 1:
            num_tokens = min(num_tokens, self._prompt_logprobs_left)
            self._prompt_logprobs_left -= num_tokens
        return num_tokens

    def _extend(self, request: Request, num_tokens: int, new_blocks: list[NewBlocks]) -> bool:
        """Allocate blocks for `num_tokens` more tokens of a running request; preempt others while blocks are short.

        The last of the running requests is preempted first. Returns False if `request` itself was preempted. Appends
        the allocated blocks to `new_blocks`.
        """
        while (added := self._kv_cache.extend(request, num_tokens)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        new_blocks += added
        return True

    def _preempt(self, request: Request) -> None:
        """Free a request's blocks and queue it again. Its pending tokens stay valid: `_admit` waits for them."""
        self._end_steady()
        self._leave(request)
        self._num_preemptions += 1
        request.num_preemptions += 1
        request.num_computed_tokens = request.num_unverified_tokens = 0
        self._waiting.add(request)

    def _add_grown(self, scheduled: Sequence[ScheduledRequest]) -> list[AddedRequest]:
        """Remove and add anew those of the `scheduled` requests that have grown, with all their blocks."""
        added = []
        for item in scheduled:
            request = self._grown.pop(item.request_id, None)
            if request is not None:
                self._removed.append(request.request_id)
                added.append(self._added(request, item.num_computed_tokens))
        return added

    def _added(self, request: Request, num_computed: int) -> AddedRequest:
        """Return what the device needs of a request that enters the running set after `num_computed` tokens."""
        return AddedRequest(
            request_id=request.request_id,
            token_ids=request.token_ids(0, request.num_tokens)
            if request.output_token_ids
            else request.prompt_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_computed,
            block_ids=self._kv_cache.block_ids(request),
            sampling_params=request.sampling_params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            bad_words=request.bad_words,
            prompt_embeds=request.prompt_embeds,
            lora=None if request.lora is None or self._lora_slots is None else self._lora_slots.acquire(request.lora),
        )

    def _leave(self, request: Request) -> None:
        """Free the blocks of a request that no longer runs, and its row of device state in the next step."""
        self._grown.pop(request.request_id, None)
        self._removed.append(request.request_id)
        self._kv_cache.free(request)
        if request.lora is not None and self._lora_slots is not None:
            self._lora_slots.release(request.lora)

    def _admit_all(
        self, budget: int, decodes: list[ScheduledRequest], others: list[ScheduledRequest]
    ) -> tuple[AddedRequest, ...]:
        """Admit waiting requests while they fit; append what each computes in this step to `decodes` or `others`."""
        added: list[AddedRequest] = []
        passed_over: list[Request] = []  # because their adapters have to wait for a slot
        adapters = None if self._lora_slots is None else WaitingAdapters(self._lora_slots)
        while budget and self._can_admit:
            lora = self._waiting.peek().lora
            if adapters is not None and lora is not None and adapters.has_to_wait(lora):
                passed_over.append(self._waiting.pop())
                continue
            admitted = self._admit(budget)
            if admitted is None:
                break
            added_request, item = admitted
            added.append(added_request)
            budget -= item.num_tokens
            (decodes if item.num_tokens == 1 else others).append(item)
        for request in passed_over:
            self._waiting.add(request)
        return tuple(added)

    def _admit(self, budget: int) -> tuple[AddedRequest, ScheduledRequest] | None:
        """Admit the first waiting request with up to `budget` tokens, or return None if it cannot run now.

        The caller then admits no other request in its place.
        """
        request = self._waiting.peek()
        num_known = request.num_tokens
        if request.num_tokens_with_pending != num_known or num_known >= request.max_total_tokens:
            return None  # it was preempted: its tokens are in flight, or its last one has come and it is about to end
        hit = self._kv_cache.find_prefix(request)
        num_uncomputed = num_known - hit.num_tokens
        num_tokens = self._take_share(request, num_uncomputed, budget)
        if not num_tokens:
            return None
        num_left_free = self._watermark_blocks if self._running else 0
        if not self._kv_cache.admit(request, hit, num_tokens, num_spared_blocks=num_left_free):
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
        added = self._added(request, hit.num_tokens)
        is_sampled = num_tokens == num_uncomputed
        item = ScheduledRequest(request.request_id, num_tokens, hit.num_tokens, is_sampled, request.epoch)
        request.num_computed_tokens = hit.num_tokens + num_tokens
        if num_tokens != 1:
            self._kv_cache.register(request, request.num_computed_tokens)
        request.num_tokens_with_pending += is_sampled
        return added, item
