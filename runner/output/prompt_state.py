"""`PromptState`, a prompt and its completions as its caller sees them, and how a completion ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from piecegraph.runner.common.logprobs import PromptLogprobs as CallersPromptLogprobs
from piecegraph.runner.output.async_output import TokenLogprobs
from piecegraph.runner.output.detokenizer import Detokenizer
from piecegraph.runner.output.logprob_rows import LogprobRows
from piecegraph.runner.scheduling.request import Request

if TYPE_CHECKING:
    from piecegraph.runner.output.outbox import Outbox

logger = logging.getLogger(__name__)

TOUCHED = -1
"""The value of `Completion.num_taken` while the completion's text is being changed."""


class Finish(NamedTuple):
    """The reason why a completion ends."""

    reason: str  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token or string; None for EOS and all other reasons
    error: str | None = None  # the exception, for "error"


class Delivered(NamedTuple):
    """The part of a prompt's outputs that its caller has, where outputs are deltas."""

    ends: tuple[tuple[int, int, bool], ...] = ()  # per completion: tokens, characters, and whether it has ended
    has_prompt_logprobs: bool = False


NOTHING_DELIVERED = Delivered()


@dataclass(slots=True, kw_only=True, eq=False)
class PromptState:
    """A prompt and its completions, as the caller sees them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    is_final_only: bool
    is_delta: bool
    prompt_logprobs: list[TokenLogprobs | None] | None
    outbox: Outbox  # of the caller
    arrival_time: float  # by the wall clock
    queued_ts: float  # monotonic
    delivered: Delivered = NOTHING_DELIVERED  # by outputs that were handed over
    made_prompt_logprobs: CallersPromptLogprobs | None = None  # from `prompt_logprobs`, until more of them come
    completions: list[Completion] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """True if all completions have ended."""
        return all(completion.request.finish_reason is not None for completion in self.completions)


@dataclass(slots=True, kw_only=True, eq=False)
class Completion:
    """One of a prompt's completions."""

    prompt: PromptState
    index: int
    request: Request
    detokenizer: Detokenizer | None
    is_text_late: bool  # the text is read at the end only, so it is made there
    logprobs: LogprobRows | None
    cumulative_logprob: float | None
    is_quiet: bool  # no token before the last needs any processing
    max_output: int  # tokens
    first_token_ts: float = 0.0  # monotonic; 0.0: none yet
    last_token_ts: float = 0.0  # of a token that is read, or that ended the completion
    num_taken: int = 0  # output tokens that are in all of the above, unless it is quiet; or TOUCHED
    finish: Finish | None = None  # set by the last token that was processed


def failed(request: Request, error: BaseException) -> Finish:
    """Return the end of a request whose own processing raised `error`, and log the traceback."""
    logger.error("request %r ends with an error of its own", request.request_id, exc_info=error)
    return Finish("error", error=describe_error(error))


def describe_error(error: BaseException) -> str:
    """Return the class and the text of an exception, also of one whose `__str__` raises."""
    try:
        text = str(error)
    except (Exception, SystemExit, GeneratorExit):
        text = "(an exception without a text: its __str__ raises)"
    return f"{type(error).__name__}: {text}"
