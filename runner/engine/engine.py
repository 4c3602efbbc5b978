"""`Engine`, which takes requests and returns outputs one step at a time, driven by `LLM` or a server."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from inspect import unwrap
from random import Random
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from piecegraph.errors import RequestError, UsageError
from piecegraph.runner.common.logits_processor import LogitsProcessors
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.engine.constrained import ConstrainedRequests
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.engine.request_checks import RequestChecks, make_grammars
from piecegraph.runner.output.async_output import AsyncOutput, ModelRunnerOutput, PromptLogprobs
from piecegraph.runner.output.make_output import output_of_failed
from piecegraph.runner.output.outbox import Outbox, PendingOutput
from piecegraph.runner.output.output_processor import OutputProcessor
from piecegraph.runner.output.prompt_state import Delivered, Finish, PromptState, failed
from piecegraph.runner.prompts.request_options import check_request_fields
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats
from piecegraph.runner.step.without_grad import without_grad
from piecegraph.runner.structured_output.grammars import Grammars

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from piecegraph.runner.lora.adapter import LoadedAdapter
    from piecegraph.runner.lora.request import LoRARequest
    from piecegraph.runner.lora.store import AdapterStore


class Engine:
    """An engine that schedules, runs and finishes requests. It is not thread-safe: only one thread may use it.

    With `steps_ahead` 1, a step is scheduled and launched while the preceding step still runs: the tokens that the
    preceding step samples stay on the device, and the host receives them later. If such a token ends its request, the
    next step has already computed one token too many for that request, which is dropped.

    Note [a step is a transaction]: the result of a step reaches every part of the engine, or it is computed again. Any
    exception, an interrupt included, may occur at any point of any method. `_is_dirty` is set while a method changes
    state. A call that finds it set at its start knows that an earlier call was interrupted, and first rebuilds all
    state from what survives (see Note [what survives an exception]). `_received` survives too: it is the result of a
    step that has come to the host and may be distributed only in part.

    Note [calls from inside a step]: a step runs the caller's logits processors, which may call the engine. The state is
    then dirty although nothing was interrupted. `_recover` refuses such calls with `UsageError`, and `abort` takes
    effect at the end of the step. Whether a call comes from inside a step is read from the call stack, because an
    interrupt could leave a flag set. The stacks of other threads are read, too: a call beside one of theirs is refused.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        vocab_size: int,
        seed: int,
        steps_ahead: int = 0,
        embedding_size: int | None = None,
        max_logprobs: int = -1,
        logits_processors: LogitsProcessors = (),
        adapters: AdapterStore | None = None,
    ) -> None:
        """Store the parts of the engine.

        `max_model_len`: the largest number of tokens of a prompt and its output together. `seed`: for the seeds of
        requests that have none. `steps_ahead`: the number of steps that are launched before the tokens of an earlier
        one have come to the host. `embedding_size`: the row size of prompt embeddings; None: they are refused.
        `max_logprobs`: the largest number of log probabilities that a request may ask for; -1: the whole vocabulary.
        `logits_processors`: the classes of the runner's logits processors, which also validate parameters here.
        `adapters`: the loaded adapters; None: they are not enabled.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._random = Random(seed)  # draws the seeds of requests without a seed
        self._steps_ahead = steps_ahead
        self._adapters = adapters
        self._processor = OutputProcessor(tokenizer, eos_token_ids)
        self._checks = RequestChecks(
            tokenizer=tokenizer,
            eos_token_ids=frozenset(eos_token_ids),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            embedding_size=embedding_size,
            max_logprobs=vocab_size if max_logprobs == -1 else max_logprobs,
            logits_processors=logits_processors,
            grammars=make_grammars(tokenizer, vocab_size, frozenset(eos_token_ids)),
        )
        self._requests: dict[str, Request] = {}  # the scheduler's requests, by id
        self._constrained = ConstrainedRequests(max(vocab_size, 0 if tokenizer is None else len(tokenizer)))
        self._in_flight: deque[tuple[SchedulerOutput, AsyncOutput]] = deque()
        # The step whose result is being distributed: its schedule, its result, and `_num_output_tokens` before it.
        self._received: tuple[SchedulerOutput, ModelRunnerOutput, int] | None = None
        self._is_dirty = False
        self._deferred_aborts: list[str] = []  # ids of prompts that were aborted from inside the step
        self._outbox = Outbox()  # for callers of `step` without an outbox
        self._num_arrived = 0
        self._num_output_tokens = 0
        self._num_forced_tokens = 0
        self._between_steps: Callable[[], bool] | None = None
        self._why_no_requests = ""

    def __contains__(self, request_id: str) -> bool:
        """Return whether a prompt with that id is unfinished."""
        if not self._is_inside_step():
            self._recover()
        return request_id in self._processor

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()`, without an outbox, has anything to compute or to return."""
        return self.has_unfinished_for(self._outbox)

    def has_unfinished_for(self, outbox: Outbox) -> bool:
        """Return whether `step(outbox)` has anything to compute, for any outbox, or to return."""
        return bool(self._requests or outbox or (self._is_dirty and len(self._processor)))

    @property
    def requests(self) -> Mapping[str, Request]:
        """The unfinished requests by id, one for each completion of a prompt. Callers must not change it."""
        return self._requests

    @property
    def vocab_size(self) -> int:
        """The number of token ids, which go from 0 to `vocab_size - 1`."""
        return self._checks.vocab_size

    @property
    def embedding_size(self) -> int | None:
        """The row size of prompt embeddings; None: they are refused."""
        return self._checks.embedding_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text unless its request has `ignore_eos`."""
        return self._checks.eos_token_ids

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished completions."""
        return len(self._requests)

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens generated since the start."""
        return self._num_output_tokens

    @property
    def num_forced_tokens(self) -> int:
        """The number of `num_output_tokens` that grammars have forced, so that no step has drawn them."""
        return self._num_forced_tokens

    @property
    def stats(self) -> SchedulerStats:
        """The current numbers of requests, blocks, prefix-cache hits and preemptions."""
        return self._scheduler.stats

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for benchmarks that drive the runner without this engine."""
        return self._scheduler

    @property
    def grammars(self) -> Grammars:
        """The compiled grammars of `structured_outputs`, for a server that compiles them before it adds a request.

        Unlike the engine itself they may be used by any thread.
        """
        return self._checks.grammars

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a prompt is queued, and none of its completions has been scheduled."""
        request = self._requests.get(request_id) or self._requests.get(f"{request_id}/0")  # the first of several
        return request is not None and not request.scheduled_ts

    def reset_prefix_cache(self) -> None:
        """Discard all cached prefixes; running requests continue."""
        self._scheduler.reset_prefix_cache()

    @property
    def adapters(self) -> AdapterStore:
        """The loaded LoRA adapters, which any thread may use. Raises `UsageError` if adapters are not enabled."""
        if self._adapters is None:
            raise UsageError("adapters are not enabled; make the LLM with enable_lora=True.")
        return self._adapters

    def refuse_requests(self, why: str) -> None:
        """Refuse new requests with `UsageError` and this reason, until `take_requests`; any thread may call both.

        Raises `UsageError`, with nothing changed, while requests are unfinished or another thread uses the engine.
        """
        before, self._why_no_requests = self._why_no_requests, why
        # In this order: a request that another thread adds is refused by the reason above, is being added, or is there.
        if self._is_in_another_thread():
            what = "another thread is using the engine; try again"
        elif self.has_unfinished:
            what = f"{len(self._requests)} requests are unfinished; let them finish, or abort them,"
        else:
            return
        self._why_no_requests = before
        raise UsageError(f"{what} before new ones can be refused.")

    def take_requests(self) -> None:
        """Take new requests again. Idempotent."""
        self._why_no_requests = ""

    def call_between_steps(self, action: Callable[[], bool]) -> None:
        """Call `action` before each step, until it returns True. A step raises what it raises."""
        self._between_steps = action

    def close(self) -> None:
        """End the threads that compile grammars, and forget the other ranks. Idempotent."""
        self._checks.grammars.close()
        if self._adapters is not None:
            self._adapters.bases = None  # a function that knows this engine

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
        """Queue a prompt, as `sampling_params.n` requests of the scheduler.

        Prompts with a lower `priority` are scheduled first; prompts with different `cache_salt` share no cached prefix.
        `is_final_only`: outputs are returned only when the prompt has finished. `is_checked`: `check_request` has been
        called. `lora_request`: its adapter; None: the model itself. `outbox`: only `step` and `collect` with this
        outbox return the outputs; None: those without one do.

        Raises `RequestError` if the prompt can never run or its id is in use, and what `check_lora` raises. It is not
        queued after any exception.
        """
        if self._why_no_requests:
            raise UsageError(f"{self._why_no_requests}.")
        self._recover()
        fields = {"request_id": request_id, "prompt": prompt, "priority": priority, "cache_salt": cache_salt}
        check_request_fields(sampling_params=sampling_params, **fields)
        assert outbox is None or isinstance(outbox, Outbox), f"outbox={outbox!r}; it must be an Outbox"
        if request_id in self._processor:
            raise RequestError(f"a request {request_id!r} is already running; give each its own id.")
        params = sampling_params.snapshot()
        if not is_checked:
            self.check_request(prompt_token_ids, params, prompt_embeds)
        bad_words, adapter = self._checks.bad_words(params), self._adapter(lora_request)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        tokens = self._checks.prompt_tokens(prompt_token_ids, params)
        num_prompt, max_model_len = len(tokens), self._checks.max_model_len
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                prompt_token_ids=tokens,
                sampling_params=params,
                seed=(seed + index) % 2**63,
                max_total_tokens=min(max_model_len, num_prompt + (params.max_tokens or max_model_len)),
                arrival=self._num_arrived,
                priority=priority,
                stop_token_ids=self._checks.stop_token_ids(params),
                bad_words=bad_words,
                cache_salt=cache_salt,
                prompt_embeds=prompt_embeds,
                lora=adapter,
                grammar=self._checks.grammars.start(params.structured_outputs),
            )
            for index in range(params.n)
        ]
        self._refuse_used_ids(requests)
        self._runner.step.sampler.check_request(
            params, prompt_len=num_prompt, stop_token_ids=requests[0].stop_token_ids, bad_words=bad_words
        )
        state = self._processor.prompt_state(
            request_id, prompt, requests, is_final_only=is_final_only, outbox=self._outbox if outbox is None else outbox
        )
        self._is_dirty = True
        try:
            for request in requests:
                request.arrival = self._num_arrived
                self._num_arrived += 1
                self._requests[request.request_id] = request
                self._constrained.add(request)
                self._scheduler.add(request)
            self._processor.add(state)
            self._is_dirty = False
        except BaseException:
            self._processor.drop(state)
            raise

    def step(self, outbox: Outbox | None = None) -> list[RequestOutput]:
        """Run one step and return the outputs of `outbox` that have changed.

        These are the outputs of prompts that received a token, and those that earlier calls could not return. Outputs
        for other outboxes wait there. With `steps_ahead` 1 the tokens are those of the preceding step, so the first
        call returns nothing. Call it while `has_unfinished`. After an exception, an interrupt included, call it again:
        lost results are computed again, and unreturned outputs are returned.
        """
        self._recover()
        self._advance()
        return self.collect(outbox)

    def collect(self, outbox: Outbox | None = None) -> list[RequestOutput]:
        """Return the outputs that wait in `outbox`, without running a step."""
        if outbox is None:
            outbox = self._outbox
        if outbox.news:
            self._make_outputs(outbox)
        return outbox.hand_over()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a prompt's completions now and return its output so far, or None if the prompt is not running.

        If the prompt has an outbox of its own, the final output is also returned there. A call from inside a step, by a
        logits processor, returns None; the prompt ends after the step, and its output is returned as by a step. Raises
        `RequestError` if `request_id` is not a string.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}; it must be a string, the id of one prompt.")
        if self._is_inside_step():
            self._deferred_aborts.append(request_id)
            return None
        self._recover()
        if request_id not in self._processor:
            return None
        prompt = self._processor.prompt(request_id)
        self._is_dirty = True
        self._finish_prompt(request_id, Finish("abort"))
        result = self._output(prompt, prompt.outbox.delivered(prompt))
        if prompt.outbox is self._outbox:
            self._outbox.news.pop(prompt, None)
        self._is_dirty = False
        return None if result is None else result.output

    def check_request(
        self, token_ids: Sequence[int], params: SamplingParams, prompt_embeds: torch.Tensor | None = None
    ) -> None:
        """Raise `RequestError` if a request with this prompt and these parameters can never run on this engine."""
        self._checks.check(token_ids, params, prompt_embeds)

    def _refuse_used_ids(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._requests:
                raise RequestError(f"a request {request.request_id!r} is already running; give each its own id.")

    def check_lora(self, lora_request: LoRARequest | None) -> None:
        """Read the adapter of a request unless it is loaded. Raises what `add_request` raises for an adapter."""
        self._adapter(lora_request)

    def _adapter(self, lora_request: LoRARequest | None) -> LoadedAdapter | None:
        if lora_request is None:
            return None
        if self._adapters is None:
            raise RequestError(
                f"lora_request={lora_request.lora_name!r}, and adapters are not enabled; make the LLM with "
                "enable_lora=True."
            )
        return self._adapters.add(lora_request)

    def _take_prompt_logprobs(self, done: SchedulerOutput, found: Mapping[str, PromptLogprobs]) -> None:
        """Pass the prompt log probabilities of a step to the output processor.

        A request that was preempted after the step was scheduled is skipped, because it computes them again. So is a
        request that has finished, even if a new request has its id.
        """
        for item in done.scheduled:
            request = self._requests.get(item.request_id)
            if item.request_id in found and request is not None and request.epoch == item.epoch:
                self._processor.take_prompt_logprobs(item.request_id, found[item.request_id])

    def _finish_prompt(self, request_id: str, finish: Finish) -> None:
        """End all unfinished completions of a prompt."""
        for completion in self._processor.request_ids(request_id):
            self._finish(completion, finish)

    def _finish_failed(self, errors: Mapping[str, BaseException]) -> None:
        """End the requests in `errors`, each with its error; those that have ended already are skipped."""
        for request_id, error in errors.items():
            if request_id in self._requests:
                self._finish(request_id, failed(self._requests[request_id], error))

    def _finish(self, request_id: str, finish: Finish) -> None:
        """End a request in all parts of the engine."""
        request = self._requests[request_id]
        self._processor.finish(request, finish)
        assert request.finish_reason is not None
        self._scheduler.finish(request_id, request.finish_reason, request.stop_reason)
        del self._requests[request_id]
        if request.grammar is not None:
            self._constrained.remove(request_id)
        self._processor.forget(request)

    @without_grad
    def _advance(self) -> None:
        """Launch one step, and distribute the result of the oldest one if more than `steps_ahead` are in flight."""
        self._is_dirty = True
        if self._between_steps is not None and self._between_steps():
            self._between_steps = None
        output = self._scheduler.schedule()
        if not output.is_empty:
            self._in_flight.append((output, self._launch(output)))
        if self._in_flight and (output.is_empty or len(self._in_flight) > self._steps_ahead):
            done, result = self._in_flight.popleft()
            found = self._read(done, result)
            self._received = (done, found, self._num_output_tokens)  # from now on its tokens cannot be lost
            self._distribute(*self._received)
            self._received = None
        if self._deferred_aborts:
            self._abort_deferred()
        self._is_dirty = False

    def _launch(self, output: SchedulerOutput) -> AsyncOutput:
        """Launch a step that is not empty."""
        self._runner.execute_model(output)
        grammar = self._constrained.mask(output, self._in_flight) if self._constrained.requests else None
        return self._runner.sample_tokens(grammar)

    def _read(self, done: SchedulerOutput, result: AsyncOutput) -> ModelRunnerOutput:
        """Wait for the result of a step, and return it."""
        return result.get()

    def _abort_deferred(self) -> None:
        """End the prompts that were aborted from inside the step. Their outputs wait in their outboxes."""
        while self._deferred_aborts:
            if self._deferred_aborts[0] in self._processor:
                self._finish_prompt(self._deferred_aborts[0], Finish("abort"))
            del self._deferred_aborts[0]

    def _is_inside_step(self) -> bool:
        """Return whether the current call comes from inside a step; see Note [calls from inside a step]."""
        if not self._is_dirty:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (frame.f_code is _CODE_OF_ADVANCE and frame.f_locals.get("self") is self):
            frame = frame.f_back
        return frame is not None

    def _is_in_another_thread(self) -> bool:
        """Return whether another thread is inside a method of this engine that changes state."""
        for thread, top in sys._current_frames().items():
            frame = None if thread == get_ident() else top
            while frame is not None and not (frame.f_code in _CODES_THAT_CHANGE and frame.f_locals.get("self") is self):
                frame = frame.f_back
            if frame is not None:
                return True
        return False

    def _distribute(self, done: SchedulerOutput, found: ModelRunnerOutput, num_before: int) -> None:
        """Pass the result of a step to the scheduler and the output processor, and end requests that are complete.

        `num_before`: `_num_output_tokens` before the step.
        """
        if found.prompt_logprobs:
            self._take_prompt_logprobs(done, found.prompt_logprobs)
        if found.errors:
            self._finish_failed(found.errors)
        if self._constrained.requests:
            for request, error in self._constrained.unmasked(done):
                self._finish(request.request_id, failed(request, error))
        took = self._scheduler.complete_step(done, found.token_ids)
        self._num_output_tokens = num_before + len(took)
        # If the lengths are equal, no token was dropped, so `tokens` and `took` have the same order.
        tokens = found.token_ids.token_ids if len(took) == len(found.token_ids) else None
        ended, _ = self._processor.take_tokens(took, found.logprobs, tokens)
        for request, finish in ended:
            self._finish(request.request_id, finish)
        if self._constrained.requests:
            self._finish_constrained(took)
            is_plain = type(self._scheduler) is Scheduler and not self._checks.logits_processors
            if is_plain and not self._runner.step.state_caches:
                self._append_forced(took)

    def _append_forced(self, requests: Sequence[Request]) -> None:
        """Give requests the tokens that their grammars force, without steps that draw them; some end by that.

        The next step computes them together, as a chunk of a prompt. What steps in flight draw for such a request, the
        first of these tokens, is dropped.
        """
        for request in requests:
            if not self._scheduler.can_append(request):
                continue
            forced = self._constrained.take_forced(request, self._checks.vocab_size)
            if not forced:
                continue
            self._scheduler.begin_append(request)
            for token in forced:
                request.output_token_ids.append(token)
                self._num_output_tokens += 1
                self._num_forced_tokens += 1
                ended, _ = self._processor.take_tokens([request], {})
                for _, finish in ended:
                    self._finish(request.request_id, finish)
                if request.finish_reason is not None:
                    break
            else:
                self._scheduler.end_append(request)
                self._finish_constrained([request])

    def _finish_constrained(self, requests: Sequence[Request]) -> None:
        """End those of `requests` whose outputs are complete by their grammars, or violate them."""
        for request, error in self._constrained.ended(requests):
            self._finish(request.request_id, Finish("stop") if error is None else failed(request, error))

    def _recover(self) -> None:
        """Rebuild all state if an exception has interrupted a call; see Note [a step is a transaction].

        If it is itself interrupted, the next call begins it again.
        """
        if not self._is_dirty:
            return
        if self._is_inside_step():
            raise UsageError(
                "a step is already running; logits processors, which run inside a step, may only call abort."
            )
        if self._is_in_another_thread():
            raise UsageError(
                "another thread is using the engine; one thread drives it. Give all prompts to one call of generate, "
                "or see docs/examples/engine_loop.py for a loop that answers several threads."
            )
        self._in_flight.clear()
        self._runner.reset()
        unfinished = self._processor.unfinished
        self._requests = {request.request_id: request for request in unfinished}
        self._constrained.start_over(unfinished)
        self._processor.settle()
        if self._received is not None:
            self._distribute_again(*self._received)
        self._scheduler.start_over(unfinished)
        received = {} if self._received is None else self._received[1].logprob_rows
        for request, finish in self._processor.start_over(received):
            self._finish(request.request_id, finish)
        if self._received is not None and self._received[1].errors:
            self._finish_failed(self._received[1].errors)
        if self._constrained.requests:
            self._finish_constrained(unfinished)
        self._abort_deferred()
        self._received = None
        self._is_dirty = False

    def _distribute_again(self, done: SchedulerOutput, found: ModelRunnerOutput, num_before: int) -> None:
        """Do the work of an interrupted `_distribute`: give a token to each request that has not received it.

        The number of tokens that a request has shows whether it has received that of this step.
        """
        if found.prompt_logprobs:
            self._take_prompt_logprobs(done, found.prompt_logprobs)
        num_received, errors = 0, found.errors or {}
        for item in done.sampled:
            request = self._requests.get(item.request_id)
            if request is None or request.epoch != item.epoch or item.request_id in errors:
                continue
            output = request.output_token_ids
            if len(output) == item.num_computed_tokens + item.num_tokens - request.num_prompt_tokens:
                output.append(found.token_ids[item.request_id])
            num_received += 1
            self._processor.notify(item.request_id)
        if self._num_output_tokens == num_before:  # else `_distribute` has counted them, before any request ended
            self._num_output_tokens += num_received

    def _make_outputs(self, outbox: Outbox) -> None:
        """Turn the news of `outbox` into outputs that are ready to be handed over."""
        self._recover()
        self._is_dirty = True
        results = [self._output(prompt, outbox.delivered(prompt)) for prompt in tuple(outbox.news)]
        # If an interrupt separates the two assignments, the news are processed again without a second delta, because
        # `delivered` counts what is ready.
        outbox.ready, outbox.news = [*outbox.ready, *(one for one in results if one is not None)], {}
        self._is_dirty = False

    def _output(self, prompt: PromptState, delivered: Delivered) -> PendingOutput | None:
        """Return a prompt's output, or None if nothing is new. The prompt is not changed.

        If making the output raises, the prompt's completions end with that error, and the output says so.
        """
        try:
            return self._processor.output(prompt, delivered)
        except MemoryError:
            raise
        except Exception as error:
            for completion in prompt.completions:
                request = completion.request
                if request.finish_reason is None:
                    self._finish(request.request_id, failed(request, error))
                else:
                    finish = failed(request, error)
                    request.finish_reason, request.error = finish.reason, finish.error
            return PendingOutput(prompt, output_of_failed(prompt), delivered)


_CODE_OF_ADVANCE: CodeType = unwrap(Engine._advance).__code__
"""The code by which frames of a running step are recognised. `unwrap` removes the decorator."""

_CODES_THAT_CHANGE = frozenset(
    unwrap(each).__code__
    for each in (Engine._advance, Engine._recover, Engine._make_outputs, Engine.add_request, Engine.abort)
)
"""The code of the methods that set `_is_dirty`."""
