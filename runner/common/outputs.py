"""The outputs of generation: `RequestOutput` and `CompletionOutput`."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from piecegraph.runner.common.logprobs import PromptLogprobs, SampleLogprobs


@dataclass(slots=True)
class RequestStateStats:
    """The times at which a request reached each stage, and its number of tokens, with vLLM's names and meanings.

    `arrival_time` is a wall-clock time (`time.time`), all others are `time.monotonic`, in seconds; 0.0 means not yet.
    The time of a token is the time at which the host received it, at the granularity of the caller's outputs.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0  # first admitted
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0  # or the end of the request if only the final output is read
    first_token_latency: float = 0.0  # seconds from queued_ts to first_token_ts
    is_corrupted: bool = False  # vLLM's; never set


class _LazyFields:
    """A slot for the fields of a `CompletionOutput` that are copied when they are first read."""

    __slots__ = ("_lazy_fields",)


@dataclass(slots=True, kw_only=True)
class CompletionOutput(_LazyFields):
    """One completion as generated so far; complete when `finish_reason` is set."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None: still running
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for EOS
    error: str | None = None  # for "error": the exception that ended this completion and no other

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None

    @classmethod
    def with_lazy_fields(
        cls,
        *,
        lazy_fields: Mapping[str, tuple[MutableSequence[Any], int, int]],
        **fields: Any,
    ) -> CompletionOutput:
        """Return an output whose `lazy_fields` are copied when they are first read.

        Each is a slice (sequence, start, stop) of a sequence that is only appended to. So an output whose tokens
        nobody reads has a constant cost, however many tokens there are.
        """
        output = cls(token_ids=[], **fields)
        object.__setattr__(output, "_lazy_fields", dict(lazy_fields))
        for name in lazy_fields:
            delattr(output, name)
        return output

    def __getattr__(self, name: str) -> Any:
        # Called for an empty slot, which `with_lazy_fields` leaves.
        lazy_fields = _lazy_fields(self)
        if name not in lazy_fields:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        values, start, stop = lazy_fields[name]
        found = values[start:stop]
        setattr(self, name, found)
        lazy_fields.pop(name, None)  # last: a read that was interrupted is repeated
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, ({name: getattr(self, name) for name in self.__dataclass_fields__},)


def _lazy_fields(output: CompletionOutput) -> dict[str, tuple[MutableSequence[Any], int, int]]:
    try:
        found: dict[str, tuple[MutableSequence[Any], int, int]] = object.__getattribute__(output, "_lazy_fields")
    except AttributeError:
        return {}
    return found


def _rebuild(fields: dict[str, Any]) -> CompletionOutput:
    return CompletionOutput(**fields)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None
    finished: bool
    outputs: list[CompletionOutput]
    num_cached_tokens: int = field(default=0, compare=False)  # of the prompt, found in the prefix cache
    metrics: RequestStateStats | None = field(default=None, compare=False)  # of its first completion
