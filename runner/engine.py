"""Requests in, outputs out, one step at a time: what `LLM`, or any other server, drives."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from piecegraph.errors import RequestError
from piecegraph.runner.async_output import AsyncOutput, PromptLogprobs
from piecegraph.runner.model_runner import ModelRunner
from piecegraph.runner.output_processor import OutputProcessor
from piecegraph.runner.outputs import RequestOutput
from piecegraph.runner.sampling.bad_word_tokens import bad_words_token_ids
from piecegraph.runner.sampling_params import SamplingParams
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler import Scheduler, SchedulerStats
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from piecegraph.runner.without_grad import without_grad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Schedules, runs and finishes requests. Not thread-safe: one caller drives it.

    With `steps_ahead` 1 a step is scheduled and launched while the one before still runs: the tokens that
    one samples stay on the device, and the host learns them later. A request that ends with a token the
    host does not know yet has then been computed one token too far, which is dropped.
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
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._random = Random(seed)  # seeds of requests that bring none
        self._steps_ahead = steps_ahead
        self._processor = OutputProcessor(tokenizer, eos_token_ids)
        self._requests: dict[str, Request] = {}  # the scheduler's, by its ids
        self._in_flight: deque[tuple[SchedulerOutput, AsyncOutput]] = deque()
        self._num_arrived = 0
        self._num_output_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def requests(self) -> Mapping[str, Request]:
        """Unfinished requests by id, a prompt's several completions each on its own; read only."""
        return self._requests

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this, exclusive."""
        return self._vocab_size

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated since the start."""
        return self._num_output_tokens

    @property
    def stats(self) -> SchedulerStats:
        """Requests, blocks, prefix cache and preemptions."""
        return self._scheduler.stats

    @property
    def scheduler(self) -> Scheduler:
        """For benches, which drive the runner without this engine's bookkeeping."""
        return self._scheduler

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        is_final_only: bool = False,
        is_checked: bool = False,
    ) -> None:
        """Queue a prompt. A lower `priority` goes first; prompts of unlike `cache_salt` share no cached prefix.
        `is_final_only`: `step` returns it once, finished. `is_checked`: by `check_request`.

        Raises `RequestError` if it can never run; the engine is unchanged then.
        """
        if request_id in self._processor:
            raise RequestError(f"a request {request_id!r} is already running; give each its own id.")
        if not is_checked:
            self.check_request(prompt_token_ids, sampling_params)
        params = sampling_params
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            assert self._tokenizer is not None, "checked by check_request"
            bad_words = bad_words_token_ids(self._tokenizer, params.bad_words)
        num_prompt = len(prompt_token_ids)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        tokens = list(prompt_token_ids)
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                prompt_token_ids=tokens,
                sampling_params=params,
                seed=(seed + index) % 2**63,
                max_total_tokens=min(self._max_model_len, num_prompt + (params.max_tokens or self._max_model_len)),
                arrival=self._num_arrived,
                priority=priority,
                stop_token_ids=frozenset(params.stop_token_ids or ())
                | (frozenset() if params.ignore_eos else self._eos_token_ids),
                bad_words=bad_words,
                cache_salt=cache_salt,
            )
            for index in range(params.n)
        ]
        for request in requests:
            if request.request_id in self._requests:
                raise RequestError(f"a request {request.request_id!r} is already running; give each its own id.")
        for request in requests:
            request.arrival = self._num_arrived
            self._num_arrived += 1
            self._requests[request.request_id] = request
            self._scheduler.add(request)
        self._processor.add(request_id, prompt, requests, is_final_only=is_final_only)

    @without_grad
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the prompts that got a token, each as it stands.

        With steps ahead it is the output of the step before, so the first call returns nothing; call on
        while `has_unfinished`.
        """
        try:
            output = self._scheduler.schedule()
            if not output.is_empty:
                self._runner.execute_model(output)
                self._in_flight.append((output, self._runner.sample_tokens()))
            if not self._in_flight or (len(self._in_flight) <= self._steps_ahead and not output.is_empty):
                return []
            done, result = self._in_flight.popleft()
            found = result.get()
        except BaseException:
            self._in_flight.clear()
            self._runner.reset()
            self._scheduler.forget_steps_in_flight()
            raise
        if found.prompt_logprobs:
            self._take_prompt_logprobs(done, found.prompt_logprobs)
        took = self._scheduler.complete_step(done, found.token_ids)
        self._num_output_tokens += len(took)
        # As many as sampled are those that sampled, in the same order.
        tokens = found.token_ids.token_ids if len(took) == len(found.token_ids) else None
        ended, prompts = self._processor.take_tokens(took, found.logprobs, tokens)
        for request, finish in ended:
            self._finish(request.request_id, *finish)
        outputs = map(self._processor.output, prompts)
        return [one for one in outputs if one is not None]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a prompt's completions now; returns what it had, or None if it is not running."""
        if request_id not in self._processor:
            return None
        for completion in self._processor.request_ids(request_id):
            self._finish(completion, "abort")
        return self._processor.output(request_id)

    def check_request(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise `RequestError` if such a request can never run here."""
        if self._tokenizer is None:
            for name, value in (("stop strings", params.stop_strings), ("bad_words", params.bad_words)):
                if value:
                    raise RequestError(
                        f"{name} need a tokenizer, and there is none (skip_tokenizer_init); use "
                        f"{'stop_token_ids' if name == 'stop strings' else 'logit_bias'}."
                    )
        params.check_vocabulary(self._vocab_size)
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token.")
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self._max_model_len} leaves room for at most "
                f"{self._max_model_len - 1} and one more to generate. Shorten it, or raise max_model_len."
            )
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self._vocab_size:
            return
        for token in token_ids:
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise RequestError(f"the prompt has token id {token!r}; ids go from 0 to {self._vocab_size - 1}.")

    def _take_prompt_logprobs(self, done: SchedulerOutput, found: Mapping[str, PromptLogprobs]) -> None:
        """Those of requests still in the stay that computed them. An id may be another request's by now, whose prompt
        they are not of; a request admitted again computes its own anew."""
        for item in done.scheduled:
            request = self._requests.get(item.request_id)
            if item.request_id in found and request is not None and request.epoch == item.epoch:
                self._processor.take_prompt_logprobs(item.request_id, found[item.request_id])

    def _finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        self._scheduler.finish(request_id, reason, stop_reason)
        self._processor.finish(self._requests.pop(request_id))
