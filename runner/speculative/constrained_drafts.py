"""Grammars of requests that draft: a mask for each row that verifies a draft, and the end of an output inside a step.

Note [a row's mask]: row j of a request draws the token behind its first j drafts, so what the grammar allows there
follows from these drafts. The matcher reads them one after the other, and is rolled back, because they may be rejected.
A draft that the grammar does not allow is rejected by the mask of its own row, so the rows behind it need none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from piecegraph.errors import RequestError
from piecegraph.runner.engine.constrained import ConstrainedRequests
from piecegraph.runner.output.async_output import AsyncOutput
from piecegraph.runner.sampling.options.grammar import GrammarOutput
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput
from piecegraph.runner.speculative.verified_output import VerifiedOutput
from piecegraph.runner.structured_output.protocol import Bitmask, GrammarMatcher


class ConstrainedDrafts(ConstrainedRequests):
    """The unfinished requests with a grammar, in an engine whose steps give a request several tokens."""

    def drafting(self, output: SchedulerOutput) -> list[str]:
        """Return the ids of those that verify drafts in a step."""
        return [request_id for request_id in output.num_drafts if request_id in self.requests]

    def mask_drafts(
        self,
        output: SchedulerOutput,
        in_flight: Sequence[tuple[SchedulerOutput, AsyncOutput]],
        drafts: Mapping[str, Sequence[int]],
    ) -> GrammarOutput | None:
        """Return the tokens that the rows of a step may draw, as `mask` does, with as many rows as a request verifies.

        `drafts`: those that the step verifies of the requests in `drafting`, where there are any. See Note [a row's
        mask].
        """
        items = [item for item in output.scheduled if item.is_sampled and item.request_id in self.requests]
        if not items:
            return None
        num_rows = [1 + output.num_drafts.get(item.request_id, 0) for item in items]
        bitmask = np.full((sum(num_rows), self.num_words), -1, dtype=np.int32)
        first = 0
        for item, count in zip(items, num_rows, strict=True):
            request = self.requests[item.request_id]
            grammar = request.grammar
            assert grammar is not None, "only requests with a grammar are added"
            with suppress(RequestError):  # `ended` tells it
                grammar.advance([*request.output_token_ids, *_pending(item, in_flight)])
                rows = bitmask[first : first + count]
                error = _fill(rows, grammar.matcher, drafts.get(item.request_id, ()))
                if error is not None:  # the request ends before what is drawn here is read
                    rows[:] = -1
                    grammar.fail_mask(error)
            first += count
        request_ids = [item.request_id for item, count in zip(items, num_rows, strict=True) for _ in range(count)]
        return GrammarOutput(bitmask=torch.from_numpy(bitmask), request_ids=tuple(request_ids))

    def cut(self, done: SchedulerOutput, found: VerifiedOutput) -> VerifiedOutput:
        """Return the output of a step without the tokens behind the end of a grammar, or behind a violation of it."""
        verified, logprobs = dict(found.verified), dict(found.verified_logprobs)
        for item in done.sampled:
            request = self.requests.get(item.request_id)
            if request is None or request.epoch != item.epoch:
                continue
            grammar, one = request.grammar, verified[item.request_id]
            assert grammar is not None, "only requests with a grammar are added"
            num_before = one.first_position - request.num_prompt_tokens
            with suppress(RequestError):  # `ended` tells it
                grammar.advance([*request.output_token_ids[:num_before], *one.token_ids])
            if grammar.end is None or grammar.end >= num_before + len(one.token_ids):
                continue
            count = max(grammar.end - num_before, 1)
            verified[item.request_id] = one._replace(token_ids=one.token_ids[:count])
            if item.request_id in logprobs:
                logprobs[item.request_id] = logprobs[item.request_id][:count]
        return replace(found, verified=verified, verified_logprobs=logprobs)


def _fill(rows: Bitmask, matcher: GrammarMatcher, drafts: Sequence[int]) -> str | None:
    """Write the mask of each row; rows behind a draft that cannot be accepted, or that ends the output, stay as are.

    Returns what is wrong if a mask cannot be computed, after which the matcher is of no more use, else None.
    """
    num_read, failure = 0, None
    try:
        for row in range(len(rows)):
            failure = matcher.fill_bitmask(rows, row)
            if failure is not None or row >= min(len(drafts), len(rows) - 1):
                break
            draft = drafts[row]
            if not int(rows[row, draft >> 5]) >> (draft & 31) & 1 or matcher.is_stopped():
                break
            error = matcher.accept([draft])
            assert error is None, f"the mask allows token {draft}, and the grammar does not: {error}"
            num_read += 1
    finally:
        if num_read and failure is None:
            matcher.rollback(num_read)
    return failure


def _pending(item: ScheduledRequest, in_flight: Sequence[tuple[SchedulerOutput, AsyncOutput]]) -> list[int]:
    """Return the tokens that steps in flight have given to a request; waits for these steps."""
    tokens: list[int] = []
    for done, result in in_flight:
        if any(one.request_id == item.request_id and one.epoch == item.epoch for one in done.sampled):
            found = result.get()
            assert isinstance(found, VerifiedOutput), type(found)
            tokens += found.verified[item.request_id].token_ids
    return tokens
