"""Which requests run in a step, and how many tokens of each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piecegraph.errors import RequestError
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.request_queue import RequestQueue, SchedulingPolicy
from piecegraph.runner.scheduling.scheduler_output import (
    AddedRequest,
    NewBlocks,
    SampledTokens,
    ScheduledDecodes,
    ScheduledRequest,
    SchedulerOutput,
)
from piecegraph.runner.scheduling.steady_decode import SteadyDecode

REGISTRATION_INTERVAL = 64
"""Steps after which requests that decode steadily register the blocks they have filled. Nobody looks for blocks in a
steady decode, and whatever ends it registers them first, so this only bounds what is left for that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts since the start, except where it says now."""

    num_running: int  # now
    num_waiting: int  # now
    num_free_blocks: int  # now; cached ones that nobody holds are free
    num_blocks: int
    num_prefix_queries: int  # tokens of requests when first admitted
    num_prefix_hits: int  # of those, found in the cache
    num_preemptions: int


class Scheduler:
    """A budget of tokens a step, spent on running requests first and then on waiting ones, each in the order of
    `policy`; a prompt longer than what is left runs in chunks, mixed with decodes.

    Follows vLLM's V1 scheduler. Preemption is completion and resumption a fresh add, as in its Model Runner V2:
    a preempted request loses its blocks and its row, waits at its old place, and is added again with all it knows.

    `schedule` may be called before the tokens of earlier steps are known. A request then computes a token that is
    pending: sampled, but known to the device only. `complete_step` tells the tokens, in the order of scheduling.

    Note [one stream]: steps run on the device one after the other, in the order they were scheduled. So a block
    may change hands while a step in flight still uses it. A block of a prompt is found in the prefix cache from the
    moment the step that fills it is being scheduled, by requests of that very step too: each layer writes the
    keys and values of all requests with several tokens before any request attends. (Those with one token may write
    theirs as they attend, so a block that such a token fills is found in later steps.) Prompts that arrive together
    and begin alike compute what they share once.
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
        """`watermark`: fraction of the blocks that admission leaves free for those that run, while any do.
        `prompt_logprobs_chunk`: tokens a step of prompts whose logprobs are wanted, of all such prompts together:
        each takes a row of logits.
        """
        assert max_num_seqs >= 1 and max_num_batched_tokens >= 1 and prompt_logprobs_chunk >= 1
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._policy = policy
        self._num_spared_blocks = int(watermark * kv_cache.num_blocks)
        self._prompt_logprobs_chunk = prompt_logprobs_chunk
        self._prompt_logprobs_left = prompt_logprobs_chunk  # of this step's

        self._requests: dict[str, Request] = {}  # all unfinished
        self._waiting = RequestQueue(policy)
        self._running: list[Request] = []  # in the order of `policy`
        self._steady: SteadyDecode | None = None  # of those that run and still draw tokens; None: look at each
        self._removed: list[str] = []
        self._num_admissions = 0
        self._num_steps = 0
        self._num_completed_steps = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def stats(self) -> SchedulerStats:
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
        """See `KVCacheManager`."""
        return self._kv_cache.blocks_needed(num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """See `KVCacheManager`; the engine refuses a request that cannot, with what it knows of its settings."""
        return self._kv_cache.can_ever_fit(num_tokens)

    def add(self, request: Request) -> None:
        """Queue a new request. Raises RequestError if one of its id is unfinished."""
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
        """Take a request off for good, running or waiting, in a step in flight or not.

        Returns it, or None if there is none of that id (it may just have ended). Its blocks are free at once, see
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
            if self._steady is not None and request.kept_by is self._steady:
                self._steady.drop(request)
                self._register_decoded(request)
            self._leave(request)
        return request

    def abort(self, request_id: str) -> Request | None:
        """`finish` for a caller who wants no more of it."""
        return self.finish(request_id, "abort")

    def reset_prefix_cache(self) -> None:
        """Find no prefix computed so far, for instance because the weights have changed."""
        self._kv_cache.reset_prefix_cache()

    def schedule(self) -> SchedulerOutput:
        """The next step's work.

        Empty if nothing can run before a step in flight is completed, or nothing is unfinished. While the same
        requests decode and nobody else can come in, a step costs what changes in it: the blocks that are added.
        """
        if (steady := self._steady) is not None:
            decodes_only = None if self._can_admit else self._schedule_steady(steady)
            if decodes_only is not None:
                return decodes_only
            self._end_steady()
        budget = self._max_num_batched_tokens
        self._prompt_logprobs_left = self._prompt_logprobs_chunk
        decodes: list[ScheduledRequest] = []
        others: list[ScheduledRequest] = []
        new_blocks: list[NewBlocks] = []
        num_preemptions = self._num_preemptions
        make = tuple.__new__  # what ScheduledRequest(...) ends in, at half its cost
        # Who gives way is the last to run, hence not scheduled yet: a loop over a list stops at its new end.
        for request in self._running:
            if not budget:
                break
            num_with_pending = request.settled_num_tokens_with_pending
            if num_with_pending >= request.max_total_tokens:
                continue  # all its tokens are known or pending
            num_computed = request.settled_num_computed_tokens
            num_uncomputed = num_tokens = num_with_pending - num_computed
            if num_tokens != 1:
                num_tokens = self._take_share(request, num_uncomputed, budget)
                if not num_tokens:
                    continue  # others' prompts take all the rows of logits that this step may have
            num_computed_after = num_computed + num_tokens
            if num_computed_after > request.num_slots and not self._extend(request, num_tokens, new_blocks):
                break  # it was the last, and gave way itself
            request.settled_num_computed_tokens = num_computed_after
            is_sampled = num_tokens == num_uncomputed
            if is_sampled:
                request.settled_num_tokens_with_pending = num_with_pending + 1
            budget -= num_tokens
            item = make(ScheduledRequest, (request.request_id, num_tokens, num_computed, is_sampled, request.epoch))
            if num_tokens == 1:
                decodes.append(item)
            else:
                others.append(item)
                self._kv_cache.register(request, num_computed_after)

        added: list[AddedRequest] = []
        if self._num_preemptions == num_preemptions:  # else the blocks they would get are needed by those that run
            while budget and self._can_admit:
                admitted = self._admit(budget)
                if admitted is None:
                    break
                added.append(admitted[0])
                budget -= admitted[1].num_tokens
                (decodes if admitted[1].num_tokens == 1 else others).append(admitted[1])

        if not decodes and not others:
            return SchedulerOutput(step=self._num_steps)
        # The longest first: attention's programs begin in this order, and what begins last should be soon done.
        lengths = [item.num_computed_tokens for item in decodes]
        ranks = sorted(range(len(decodes)), key=lengths.__getitem__, reverse=True)
        decodes = [decodes[rank] for rank in ranks]
        # With budget left and nobody preempted, all that run were looked at; those left out have all their tokens.
        is_decode_only = budget and not (others or added) and self._num_preemptions == num_preemptions
        if is_decode_only and not self._can_admit and sum([item.is_sampled for item in decodes]) == len(decodes):
            self._steady = SteadyDecode([self._requests[item.request_id] for item in decodes], ranks)
        return self._output((*decodes, *others), added=tuple(added), new_blocks=tuple(new_blocks))

    def complete_step(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> Sequence[Request]:
        """Tell the tokens of a finished step, for each request of `output.sampled`.

        Steps are told in the order they were scheduled, each once; empty ones need not be. Returns the requests
        that took a token, now the last of their `output_token_ids`; the engine finishes those that end with it
        before it schedules again. Tokens of requests that have ended meanwhile are dropped, those of preempted
        ones kept: they are valid, and are computed again with the rest. `SampledTokens` of a step that is
        `ScheduledDecodes` are told without looking at each request; steps of the same ones return the same list.
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
            steady.settle()  # what this step told comes after what it has kept
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

    def forget_steps_in_flight(self) -> None:
        """A step failed: what steps in flight computed and sampled is not known and never will be.

        Every running request is preempted and computed anew; no token that was told is lost. Cached prefixes are
        forgotten: a window may have named blocks of a step that failed.
        """
        self._kv_cache.reset_prefix_cache()
        self._end_steady()
        self._num_completed_steps = self._num_steps
        for request in self._requests.values():
            request.num_tokens_with_pending = request.num_tokens
        while self._running:
            self._preempt(self._running.pop())

    @property
    def _can_admit(self) -> bool:
        """Whether somebody waits and has a place, if not the blocks."""
        return len(self._waiting) > 0 and len(self._running) < self._max_num_seqs

    def _output(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        added: tuple[AddedRequest, ...] = (),
        new_blocks: tuple[NewBlocks, ...] = (),
    ) -> SchedulerOutput:
        self._num_steps += 1
        removed, self._removed = self._removed, []
        return SchedulerOutput(
            step=self._num_steps, scheduled=scheduled, added=added, new_blocks=new_blocks, removed=tuple(removed)
        )

    def _schedule_steady(self, steady: SteadyDecode) -> SchedulerOutput | None:
        """A token of each; None, and nothing changed, if somebody would have to give way for it."""
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
        """Look at each request from now on; harmless if that is so already."""
        steady, self._steady = self._steady, None
        if steady is not None:
            steady.dissolve()
            for request in steady.requests:
                self._register_decoded(request)

    def _register_decoded(self, request: Request) -> None:
        """Register what steps that are told have filled: of one that decodes, all known tokens but the last."""
        self._kv_cache.register(request, request.num_tokens - 1)

    def _take_share(self, request: Request, num_uncomputed: int, budget: int) -> int:
        """Tokens of `request` to compute in a step that has `budget` left, counted; 0: its turn is another step's."""
        num_tokens = min(num_uncomputed, budget)
        is_in_prompt = request.num_computed_tokens < request.num_prompt_tokens
        # The last token of a prompt says nothing of the prompt: alone it takes no row.
        if request.wants_prompt_logprobs and is_in_prompt and num_uncomputed > 1:
            num_tokens = min(num_tokens, self._prompt_logprobs_left)
            self._prompt_logprobs_left -= num_tokens
        return num_tokens

    def _extend(self, request: Request, num_tokens: int, new_blocks: list[NewBlocks]) -> bool:
        """Blocks for `num_tokens` of a running request, preempting from the end; False if it came to itself."""
        while (added := self._kv_cache.extend(request, num_tokens)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        new_blocks += added
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue, without blocks. Its pending tokens stay valid, so it waits for them, see `_admit`."""
        self._end_steady()
        self._leave(request)
        self._num_preemptions += 1
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        self._waiting.add(request)

    def _leave(self, request: Request) -> None:
        self._removed.append(request.request_id)
        self._kv_cache.free(request)

    def _admit(self, budget: int) -> tuple[AddedRequest, ScheduledRequest] | None:
        """Let the first waiting request run, or None if it cannot run now; nobody overtakes it."""
        request = self._waiting.peek()
        num_known = request.num_tokens
        if request.num_tokens_with_pending != num_known or num_known >= request.max_total_tokens:
            return None  # preempted with tokens in flight, or with its last token just told
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
        request.epoch = self._num_admissions
        if not request.num_preemptions:
            request.num_cached_tokens = hit.num_tokens
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
        )
        is_sampled = num_tokens == num_uncomputed
        item = ScheduledRequest(request.request_id, num_tokens, hit.num_tokens, is_sampled, request.epoch)
        request.num_computed_tokens = hit.num_tokens + num_tokens
        if num_tokens != 1:
            self._kv_cache.register(request, request.num_computed_tokens)
        request.num_tokens_with_pending += is_sampled
        return added, item
