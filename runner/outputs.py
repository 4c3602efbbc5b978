"""What generation returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion so far; whole when `finish_reason` is set."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop", "length" or "abort"; None: still running
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for EOS


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and what came of it."""

    request_id: str
    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finished: bool
    outputs: list[CompletionOutput]
