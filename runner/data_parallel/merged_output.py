"""The outputs of a prompt whose engine, in another process, sends only what is new."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Any

from piecegraph.runner.common.logprobs import FlatLogprobs, PromptLogprobs
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Taken:
    """What has been taken of a completion, replaced as one value."""

    message: int = 0  # the number of the last message
    num_tokens: int = 0
    text: str = ""
    last: CompletionOutput | None = None  # its other fields are the present ones


@dataclass(slots=True)
class _Completion:
    logprobs: MutableSequence[Any] | None  # None: not asked for
    token_ids: list[int] = field(default_factory=list)
    taken: _Taken = field(default_factory=_Taken)


class MergedOutput:
    """A prompt's whole output, made of deltas.

    `take` is idempotent: after an interrupt at any point of it, take the same message again.
    """

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._completions = [_Completion(logprobs=_no_logprobs(params)) for _ in range(params.n)]
        self._prompt_logprobs: PromptLogprobs | None = None

    def take(self, message: int, delta: RequestOutput) -> None:
        """Add what is new; messages have ascending numbers, from 1."""
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        for part in delta.outputs:
            _take(self._completions[part.index], message, part)

    def output(self, delta: RequestOutput) -> RequestOutput:
        """Return everything so far; what is of the request as a whole comes from `delta`, the last."""
        return dataclasses.replace(
            delta,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[_output(index, one) for index, one in enumerate(self._completions)],
        )


def _no_logprobs(params: SamplingParams) -> MutableSequence[Any] | None:
    if params.logprobs is None:
        return None
    return FlatLogprobs() if params.flat_logprobs else []


def _take(completion: _Completion, message: int, part: CompletionOutput) -> None:
    taken = completion.taken
    if message <= taken.message:
        return
    tokens = part.token_ids
    completion.token_ids[taken.num_tokens :] = tokens
    if part.logprobs is not None:
        assert completion.logprobs is not None, "log probabilities that were not asked for"
        num_there = len(completion.logprobs) - taken.num_tokens  # more than 0 after an interrupt
        for position in part.logprobs[num_there:]:
            completion.logprobs.append(position)
    completion.taken = _Taken(message, taken.num_tokens + len(tokens), taken.text + part.text, part)


def _output(index: int, completion: _Completion) -> CompletionOutput:
    taken = completion.taken
    last = taken.last
    lazy: dict[str, tuple[Any, int, int]] = {"token_ids": (completion.token_ids, 0, taken.num_tokens)}
    if completion.logprobs is not None:
        lazy["logprobs"] = (completion.logprobs, 0, taken.num_tokens)
    cumulative = None if completion.logprobs is None else 0.0
    if last is not None:
        cumulative = last.cumulative_logprob
    return CompletionOutput.with_lazy_fields(
        lazy_fields=lazy,
        index=index,
        text=taken.text,
        cumulative_logprob=cumulative,
        finish_reason=None if last is None else last.finish_reason,
        stop_reason=None if last is None else last.stop_reason,
        error=None if last is None else last.error,
    )
