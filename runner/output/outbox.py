"""The outputs that one caller of the engine has not got yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from piecegraph.runner.common.outputs import RequestOutput
    from piecegraph.runner.output.prompt_state import Delivered, PromptState


class PendingOutput(NamedTuple):
    """An output, and what its caller has of the prompt once the output is handed over."""

    prompt: PromptState
    output: RequestOutput
    delivered: Delivered


class Outbox:
    """The prompts of one caller that have news, in order, and the outputs made of such news.

    A step only adds prompts; `Engine.collect` makes their outputs when the caller asks. The tokens of several steps
    that the caller did not ask for are then one output, and an exception between a step and `collect` loses none.
    """

    __slots__ = ("news", "ready")

    def __init__(self) -> None:
        self.news: dict[PromptState, None] = {}
        self.ready: list[PendingOutput] = []  # made and not handed over yet

    def delivered(self, prompt: PromptState) -> Delivered:
        """Return what the caller has of a prompt once the outputs that are ready are handed over."""
        return next((made.delivered for made in reversed(self.ready) if made.prompt is prompt), prompt.delivered)

    def hand_over(self) -> list[RequestOutput]:
        """Remove and return the outputs that are ready; they count as delivered from here on."""
        for made in self.ready:
            made.prompt.delivered = made.delivered
        outputs = [made.output for made in self.ready]
        self.ready = []
        return outputs

    def __bool__(self) -> bool:
        """Return True if the caller has something to get."""
        return bool(self.news or self.ready)
