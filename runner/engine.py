"""Requests in, outputs out, one step at a time: what `LLM`, or any other server, drives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from piecegraph.errors import RequestError
from piecegraph.runner.detokenizer import Detokenizer
from piecegraph.runner.model_runner import ModelRunner
from piecegraph.runner.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.request import Request
from piecegraph.runner.sampling_params import SamplingParams
from piecegraph.runner.scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Schedules, runs and finishes requests. Not thread-safe: one caller drives it."""

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
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._random = Random(seed)  # seeds of requests that bring none
        self._requests: dict[str, Request] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def requests(self) -> Mapping[str, Request]:
        """Unfinished requests by id; read only."""
        return self._requests

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this, exclusive."""
        return self._vocab_size

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
    ) -> None:
        """Queue a request. Raises `RequestError` if it can never run; the engine is unchanged then."""
        if request_id in self._requests:
            raise RequestError(f"a request {request_id!r} is already running; give each its own id.")
        self.check_request(prompt_token_ids, sampling_params)
        num_prompt = len(prompt_token_ids)
        max_tokens = sampling_params.max_tokens
        self._requests[request_id] = request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            sampling_params=sampling_params,
            seed=sampling_params.seed if sampling_params.seed is not None else self._random.getrandbits(63),
            max_total_tokens=min(self._max_model_len, num_prompt + (max_tokens or self._max_model_len)),
            detokenizer=self._detokenizer(prompt_token_ids, sampling_params),
        )
        self._scheduler.add(request)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that got a token, in the batch's order."""
        step = self._scheduler.schedule()
        if not step.scheduled:
            assert not self._requests, "requests are waiting, yet none was scheduled"
            return []
        try:
            self._runner.execute_model(step)
            tokens = self._runner.sample_tokens()
        except BaseException:
            self._runner.reset()
            raise
        for item in step.scheduled:
            item.request.num_computed_tokens += item.num_tokens
        outputs = []
        for item, token in zip(step.sampled, tokens, strict=True):
            self._append(item.request, token)
            outputs.append(_output(item.request))
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns what it had, or None if it is not running."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._finish(request, "abort")
        return _output(request)

    def check_request(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise `RequestError` if such a request can never run here."""
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and there is none (skip_tokenizer_init); use stop_token_ids."
            )
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token.")
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self._max_model_len} leaves room for at most "
                f"{self._max_model_len - 1} and one more to generate. Shorten it, or raise max_model_len."
            )
        for token in token_ids:
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise RequestError(f"the prompt has token id {token!r}; ids go from 0 to {self._vocab_size - 1}.")

    def _detokenizer(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop_strings=params.stop_strings,
            include_stop_string=params.include_stop_str_in_output,
        )

    def _append(self, request: Request, token: int) -> None:
        """Add a sampled token, and end the request if it ends it."""
        params = request.sampling_params
        request.output_token_ids.append(token)
        is_eos = token in self._eos_token_ids and not params.ignore_eos
        is_stop = token in (params.stop_token_ids or ())
        if request.detokenizer is not None and (not (is_eos or is_stop) or params.include_stop_str_in_output):
            stop_string = request.detokenizer.append(token)
            if stop_string is not None:
                self._finish(request, "stop", stop_string)
                return
        if is_eos or is_stop:
            self._finish(request, "stop", None if is_eos else token)
        elif request.num_tokens >= request.max_total_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.detokenizer is not None and not isinstance(stop_reason, str):
            request.detokenizer.finish()
        self._scheduler.finish(request)
        del self._requests[request.request_id]


def _output(request: Request) -> RequestOutput:
    is_finished = request.finish_reason is not None
    text = ""
    if request.detokenizer is not None:
        text = request.detokenizer.text if is_finished else request.detokenizer.settled_text()
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        finished=is_finished,
        outputs=[
            CompletionOutput(
                index=0,
                text=text,
                token_ids=list(request.output_token_ids),
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
            )
        ],
    )
