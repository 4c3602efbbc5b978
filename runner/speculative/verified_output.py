"""The result of a step with drafts on its way to the host: several tokens a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from piecegraph.runner.output.async_output import (
    AsyncOutput,
    ModelRunnerOutput,
    OutputStream,
    PromptLogprobs,
    PromptRows,
    TokenLogprobs,
    token_logprobs,
)
from piecegraph.runner.sampling.logprobs import LogprobsTensors
from piecegraph.runner.scheduling.scheduler_output import SampledTokens
from piecegraph.runner.speculative.common.verified_rows import NUM_COUNTS


class VerifiedTokens(NamedTuple):
    """What a step decided for a request."""

    token_ids: list[int]  # the new tokens, one or more
    num_drafts: int  # verified in the step
    num_next_drafts: int  # drafted for the next step
    first_position: int  # of the new tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedOutput(ModelRunnerOutput):
    """The output of a step with drafts, by request id; `token_ids` and `logprobs` are empty."""

    verified: Mapping[str, VerifiedTokens]
    verified_logprobs: Mapping[str, Sequence[TokenLogprobs]]  # of the new tokens, for requests that ask for them

    @property
    def logprob_rows(self) -> Mapping[str, Sequence[TokenLogprobs]]:
        """The log probabilities of all tokens of each request."""
        return self.verified_logprobs


class AsyncVerifiedOutput(AsyncOutput):
    """The output of a step with drafts that is still being computed or copied. `get` waits for it."""

    def __init__(
        self,
        stream: OutputStream,
        *,
        request_ids: Sequence[str],
        decisions: torch.Tensor | None,
        num_columns: int,
        places: Sequence[int],
        first_rows: Sequence[int],
        logprobs: LogprobsTensors | None = None,
        prompt_rows: Sequence[PromptRows] = (),
        prompt_logprobs: LogprobsTensors | None = None,
    ) -> None:
        """Start the copy.

        Args:
            stream: the owner of the copies' memory.
            request_ids: the requests that sampled.
            decisions: `SpeculativeStep.verify`'s result; None if no request sampled.
            num_columns: its number of columns.
            places: the places of `request_ids` in the batch.
            first_rows: their first rows of `logprobs`.
            logprobs: of the tokens that the rows of logits drew.
            prompt_rows: see `AsyncOutput`.
            prompt_logprobs: see `AsyncOutput`.
        """
        self._places, self._first_rows, self._num_columns = places, first_rows, num_columns
        super().__init__(
            stream,
            request_ids=request_ids,
            token_ids=decisions,
            logprobs=logprobs,
            prompt_rows=prompt_rows,
            prompt_logprobs=prompt_logprobs,
        )

    def _make_output(
        self,
        token_ids: list[int],
        logprobs: Sequence[list[Any]] | None,
        prompt_logprobs: Mapping[str, PromptLogprobs],
    ) -> VerifiedOutput:
        """Return the output of what was copied; `token_ids` is the flat form of the decisions."""
        verified, verified_logprobs = {}, {}
        for request_id, place, first_row in zip(self._request_ids, self._places, self._first_rows, strict=True):
            one = decided_tokens(token_ids[place * self._num_columns : (place + 1) * self._num_columns])
            verified[request_id] = one
            if logprobs is not None:
                rows = range(first_row, first_row + len(one.token_ids))
                verified_logprobs[request_id] = [token_logprobs(logprobs, row) for row in rows]
        return VerifiedOutput(
            token_ids=SampledTokens((), ()),
            logprobs={},
            prompt_logprobs=prompt_logprobs,
            verified=verified,
            verified_logprobs=verified_logprobs,
        )


def decided_tokens(columns: Sequence[int]) -> VerifiedTokens:
    """Return what one row of the result of `SpeculativeStep.verify` says."""
    num_tokens, num_drafts, num_next_drafts, first_position = columns[-NUM_COUNTS:]
    return VerifiedTokens(list(columns[:num_tokens]), num_drafts, num_next_drafts, first_position)
