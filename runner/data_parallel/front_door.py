"""`FrontDoor`, which takes requests like an engine and gives each to the least loaded of several engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from piecegraph.errors import RequestError, UsageError
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import RequestOutputKind, SamplingParams
from piecegraph.runner.data_parallel.engine_adapters import EngineAdapters
from piecegraph.runner.data_parallel.engine_program import EngineFacts, NewRequest, StepNews
from piecegraph.runner.data_parallel.merged_output import MergedOutput
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.output.outbox import Outbox, PendingOutput
from piecegraph.runner.prompts.request_options import check_request_fields
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats
from piecegraph.runner.scheduling.speculation_stats import SpeculationStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.data_parallel.engine_processes import EngineProcesses
    from piecegraph.runner.lora.request import LoRARequest
    from piecegraph.runner.scheduling.request import Request

_LAST_MESSAGE = 2**62
"""The number of a prompt's last message, if that is the answer to an abort."""


@dataclass(slots=True, eq=False)
class _Routed:
    """An unfinished prompt, and where it runs."""

    request_id: str
    engine: int
    num_completions: int
    prompt: str | None
    prompt_token_ids: list[int]
    merged: MergedOutput | None  # None: its outputs are handed on as they come
    outbox: Outbox
    delivered: int = 0  # the number of the last message that its caller has; an outbox assigns it
    is_scheduled: bool = False


class FrontDoor(Engine):
    """An `Engine` whose steps run in several other processes, each with a scheduler and a KV cache of its own.

    The engines step by themselves as long as they have requests; `step` here waits for the next news of any of them.
    A request goes to the engine with the fewest unfinished completions, and stays there. Requests without a seed get
    one here, in the order of their arrival, so that tokens do not depend on where a request runs.

    An interrupt of any call leaves the front door usable: messages are taken idempotently, and dropped when they have
    been taken.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        processes: EngineProcesses,
        facts: Sequence[EngineFacts],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        first = facts[0]
        super().__init__(
            scheduler=cast(Any, None),  # both are in the other processes; what uses them is replaced here
            runner=cast(Any, None),
            tokenizer=tokenizer,
            eos_token_ids=tuple(first.eos_token_ids),
            max_model_len=min(each.max_model_len for each in facts),
            vocab_size=first.vocab_size,
            seed=config.seed,
            embedding_size=first.embedding_size,
            max_logprobs=config.max_logprobs,
            logits_processors=config.logits_processors,
            adapters=None if first.adapted is None else EngineAdapters(config, first.adapted, first.dtype, processes),
        )
        self._seeds = Random(config.seed)
        self._sampler = Sampler(  # for its checks only
            max_num_reqs=1,
            max_model_len=first.max_model_len,
            vocab_size=first.vocab_size,
            device=torch.device("cpu"),
        )
        self._processes = processes
        self._in_use = threading.RLock()  # held by the thread inside a call that reads news
        self._routed: dict[str, _Routed] = {}
        self._stats = [each.stats for each in facts]
        self._num_tokens = [0] * len(facts)
        self._num_forced = [0] * len(facts)
        self._num_added = 0  # requests that all engines have to hear of; 0 where each steps alone
        self._num_told = [0] * len(facts)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._routed

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()`, without an outbox, has anything to wait for or to return."""
        return self.has_unfinished_for(self._outbox)

    def has_unfinished_for(self, outbox: Outbox) -> bool:
        """Return whether `step(outbox)` has anything to wait for, for any outbox, or to return."""
        return bool(self._routed or outbox)

    @property
    def requests(self) -> Mapping[str, Request]:
        """Raise `UsageError`: the requests are in other processes."""
        self._refuse("requests")

    @property
    def scheduler(self) -> Scheduler:
        """Raise `UsageError`: each engine has one, in its process."""
        self._refuse("scheduler")

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished completions."""
        return sum(self.loads)

    @property
    def loads(self) -> tuple[int, ...]:
        """The number of unfinished completions of each engine."""
        loads = [0] * self._processes.num_engines
        for routed in self._routed.values():
            loads[routed.engine] += routed.num_completions
        return tuple(loads)

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens generated since the start, as far as the engines have told."""
        return sum(self._num_tokens)

    @property
    def num_forced_tokens(self) -> int:
        """The number of output tokens that grammars have determined, as far as the engines have told."""
        return sum(self._num_forced)

    @property
    def stats(self) -> SchedulerStats:
        """The numbers of all engines together, as they have last told."""
        return _summed(self._stats)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a prompt is queued, and none of its completions is known to be scheduled."""
        routed = self._routed.get(request_id)
        return routed is not None and not routed.is_scheduled

    def reset_prefix_cache(self) -> None:
        """Discard the cached prefixes of all engines; running requests continue."""
        with self._alone():
            self._processes.ask(self._all, self._take_news, "reset_prefix_cache")

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        prompt_embeds: torch.Tensor | None = None,
        lora_request: LoRARequest | None = None,
        is_final_only: bool = False,
        is_checked: bool = False,
        outbox: Outbox | None = None,
    ) -> None:
        """Give a prompt to the least loaded engine; the arguments are those of `Engine.add_request`.

        Raises `RequestError` if the prompt can never run or its id is in use.
        """
        check_request_fields(
            request_id=request_id,
            prompt=prompt,
            sampling_params=sampling_params,
            priority=priority,
            cache_salt=cache_salt,
        )
        adapter = self._adapter(lora_request)  # its engine reads it, too, and compares the digest
        if request_id in self._routed:
            raise RequestError(f"a request {request_id!r} is already running; give each its own id.")
        params = sampling_params.snapshot()
        if not is_checked:
            self.check_request(prompt_token_ids, params, prompt_embeds)
        tokens = self._checks.prompt_tokens(prompt_token_ids, params)
        self._sampler.check_request(
            params,
            prompt_len=len(tokens),
            stop_token_ids=self._checks.stop_token_ids(params),
            bad_words=self._checks.bad_words(params),
        )
        is_final_only = is_final_only or params.output_kind is RequestOutputKind.FINAL_ONLY
        is_merged = not is_final_only and params.output_kind is RequestOutputKind.CUMULATIVE
        loads = self.loads
        engine = min(self._all, key=lambda one: (loads[one], one))
        new = NewRequest(
            request_id=request_id,
            prompt_token_ids=tokens,
            params=self._as_sent(params, is_final_only=is_final_only),
            prompt=prompt,
            priority=priority,
            cache_salt=cache_salt,
            prompt_embeds=prompt_embeds,
            lora_request=lora_request,
            lora_digest=None if adapter is None else adapter.digest,
            is_final_only=is_final_only,
        )
        self._processes.send(engine, "add", new)
        if self._processes.in_lockstep:  # afterwards: all sleep once they have had the same messages and no request
            self._num_added += 1
            self._wake()
        self._routed[request_id] = _Routed(
            request_id=request_id,
            engine=engine,
            num_completions=params.n,
            prompt=prompt,
            prompt_token_ids=tokens,
            merged=MergedOutput(prompt, tokens, params) if is_merged else None,
            outbox=self._outbox if outbox is None else outbox,
        )

    def step(self, outbox: Outbox | None = None) -> list[RequestOutput]:
        """Wait for news of any engine unless some have come, and return the outputs of `outbox` that have changed.

        Outputs for other outboxes wait there. Raises `WorkerError` if an engine has failed, and `UsageError` while
        another thread reads news.
        """
        with self._alone():
            if self._routed:
                self._take_news()
                while self._processes.has_news() and self._routed:
                    self._take_news()
            return self.collect(outbox)

    def collect(self, outbox: Outbox | None = None) -> list[RequestOutput]:
        """Return the outputs that wait in `outbox`, without waiting for an engine."""
        return (self._outbox if outbox is None else outbox).hand_over()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a prompt's completions and return its output so far, or None if the prompt is not running.

        Waits for the step of its engine that runs. If the prompt has an outbox of its own, the final output is also
        returned there. Raises `RequestError` if `request_id` is not a string.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}; it must be a string, the id of one prompt.")
        with self._alone():
            routed = self._routed.get(request_id)
            if routed is None:
                return None
            (final,) = self._processes.ask((routed.engine,), self._take_news, "abort", request_id)
            if request_id not in self._routed:  # it ended meanwhile, and its output waits in its outbox
                return None
            output: RequestOutput | None = None
            if final is not None:
                output = self._whole(routed, _LAST_MESSAGE, final)
                if routed.outbox is not self._outbox:
                    self._deliver(routed, _LAST_MESSAGE, output)
            self._routed.pop(request_id, None)
            return output

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call `method` on every rank of every engine, and return the results by engine and rank."""
        with self._alone():
            answers = self._processes.ask(
                self._all, self._take_news, "call", method, timeout, args, kwargs, timeout=timeout
            )
        return [result for answer in answers for result in answer]

    def close(self) -> None:
        """End the engines. Idempotent."""
        super().close()
        self._processes.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from reading news, of which each may be for either. Raises `UsageError` if one does."""
        if not self._in_use.acquire(blocking=False):
            raise UsageError(
                "another thread is using the engines; one thread drives them. Give all prompts to one call of "
                "generate, or see docs/examples/engine_loop.py for a loop that answers several threads."
            )
        try:
            yield
        finally:
            self._in_use.release()

    @property
    def _all(self) -> range:
        return range(self._processes.num_engines)

    def _as_sent(self, params: SamplingParams, *, is_final_only: bool) -> SamplingParams:
        """Return the parameters for the engine: with a seed, and asking for deltas unless only the end is read."""
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        kind = RequestOutputKind.FINAL_ONLY if is_final_only else RequestOutputKind.DELTA
        return replace(params, seed=seed, output_kind=kind)

    def _wake(self) -> None:
        """Tell every engine that does not know it how many requests there were, so that it steps with the others.

        Called by whatever waits for engines, too, since an interrupt may have come between two messages.
        """
        for engine in self._all:
            if self._num_told[engine] != self._num_added:
                self._processes.send(engine, "wake", self._num_added)
                self._num_told[engine] = self._num_added

    def _take_news(self) -> None:
        """Wait for the news of a step and take them."""
        self._wake()
        busy: Sequence[int] = tuple({routed.engine for routed in self._routed.values()})
        if self._processes.in_lockstep:
            busy = self._all  # a step of one needs all
        number, engine, news = self._processes.next_news(busy)
        self._take(number, engine, news)
        self._processes.drop_news()

    def _take(self, number: int, engine: int, news: StepNews) -> None:
        self._stats[engine] = news.stats
        self._num_tokens[engine] = news.num_output_tokens
        self._num_forced[engine] = news.num_forced_tokens
        for request_id in news.scheduled:
            if request_id in self._routed:
                self._routed[request_id].is_scheduled = True
        for part in news.outputs:
            routed = self._routed.get(part.request_id)
            if routed is None or routed.engine != engine:
                continue  # it ended before an interrupt, or was aborted
            self._deliver(routed, number, self._whole(routed, number, part))
            if part.finished:
                self._routed.pop(part.request_id, None)

    def _whole(self, routed: _Routed, number: int, part: RequestOutput) -> RequestOutput:
        """Return the output that the caller gets for what an engine has sent."""
        if routed.merged is None:
            return replace(part, prompt=routed.prompt, prompt_token_ids=routed.prompt_token_ids)
        routed.merged.take(number, part)
        return routed.merged.output(part)

    def _deliver(self, routed: _Routed, number: int, output: RequestOutput) -> None:
        """Put an output into its caller's outbox, in place of an earlier one that has all of it. Idempotent."""
        outbox, prompt = routed.outbox, cast(Any, routed)
        if cast(int, outbox.delivered(prompt)) >= number:
            return
        kept = [one for one in outbox.ready if routed.merged is None or one.prompt is not prompt]
        outbox.ready = [*kept, PendingOutput(prompt, output, cast(Any, number))]

    def _refuse(self, name: str) -> NoReturn:
        raise UsageError(
            f"with data_parallel_size the engines are in processes of their own, and {name} with them; call a function "
            "there through collective_rpc."
        )


def _summed(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Return the numbers of several engines together."""
    counts = {
        one.name: sum(getattr(each, one.name) for each in stats)
        for one in fields(SchedulerStats)
        if one.name != "speculation"
    }
    drafts = [each.speculation for each in stats if each.speculation is not None]
    if not drafts:
        return SchedulerStats(**counts)
    speculation = SpeculationStats(
        num_verifications=sum(each.num_verifications for each in drafts),
        num_draft_tokens=sum(each.num_draft_tokens for each in drafts),
        num_accepted_tokens=sum(each.num_accepted_tokens for each in drafts),
        num_accepted_by_position=tuple(map(sum, zip(*(each.num_accepted_by_position for each in drafts), strict=True))),
        num_stopped_steps=sum(each.num_stopped_steps for each in drafts),
        stop_reason="; ".join(sorted({each.stop_reason for each in drafts} - {""})),
    )
    return SchedulerStats(**counts, speculation=speculation)
