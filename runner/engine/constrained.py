"""The requests whose outputs follow a grammar: the tokens that each may draw next, and where each ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from piecegraph.errors import RequestError
from piecegraph.runner.output.async_output import AsyncOutput
from piecegraph.runner.sampling.options.grammar import GrammarOutput
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput

_Flight = tuple[SchedulerOutput, AsyncOutput]


class ConstrainedRequests:
    """The unfinished requests with a grammar, by id; an engine without any pays nothing.

    All state but `requests` follows from the requests' output tokens, so it may be made again at any time.
    """

    def __init__(self, vocab_size: int) -> None:
        """Start without requests; `vocab_size` counts the tokenizer's tokens, too."""
        self.requests: dict[str, Request] = {}
        self.num_words = -(-vocab_size // 32)
        """The words of a row of a mask."""

    def add(self, request: Request) -> None:
        """Add a request, if it has a grammar."""
        if request.grammar is not None:
            self.requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Remove a request. Idempotent."""
        self.requests.pop(request_id, None)

    def start_over(self, unfinished: Iterable[Request]) -> None:
        """Forget everything but the grammars of the `unfinished` requests; their tokens are read again."""
        self.requests = {request.request_id: request for request in unfinished if request.grammar is not None}
        for request in self.requests.values():
            assert request.grammar is not None, "selected above"
            request.grammar.start_over()

    def mask(self, output: SchedulerOutput, in_flight: Sequence[_Flight]) -> GrammarOutput | None:
        """Return the tokens that the requests of a step may draw, while the model computes it; None: any token.

        Waits for the tokens of the steps in flight, which come before. A request that has left its grammar may draw
        any token, because it ends before this step's tokens are read.
        """
        items = [item for item in output.scheduled if item.is_sampled and item.request_id in self.requests]
        if not items:
            return None
        flights = [({one.request_id: one for one in done.sampled}, result) for done, result in in_flight]
        bitmask = np.full((len(items), self.num_words), -1, dtype=np.int32)
        for row, item in enumerate(items):
            request = self.requests[item.request_id]
            grammar = request.grammar
            assert grammar is not None, "only requests with a grammar are added"
            try:
                grammar.advance([*request.output_token_ids, *_pending(item, flights)])
            except RequestError:
                continue  # `ended` tells it
            grammar.fill_bitmask(bitmask, row)
        return GrammarOutput(bitmask=torch.from_numpy(bitmask), request_ids=tuple([item.request_id for item in items]))

    def take_forced(self, request: Request, vocab_size: int) -> list[int]:
        """Return the tokens that must come next in a request's output; they are to be appended to it now.

        None are, where something else than the grammar may have a say in the next token, or asks what the model thinks
        of it.
        """
        params, grammar = request.sampling_params, request.grammar
        if request.request_id not in self.requests or grammar is None or params.logprobs is not None:
            return []
        if params.bad_words or params.allowed_token_ids or params.logit_bias or params.min_tokens:
            return []
        if request.lora is not None or request.prompt_embeds is not None or request.wants_prompt_logprobs:
            return []  # of the parts of a row on the device, these are not made anew
        most = request.max_total_tokens - request.num_tokens
        forced = grammar.take_forced(request.output_token_ids, most, np.empty((1, self.num_words), dtype=np.int32))
        assert all(token < vocab_size for token in forced), f"{forced}: the model has {vocab_size} tokens"
        return forced

    def unmasked(self, done: SchedulerOutput) -> list[tuple[Request, RequestError]]:
        """Return the requests of a step whose tokens were drawn without their grammars, which could not be followed."""
        found = []
        for item in done.scheduled:
            request = self.requests.get(item.request_id)
            if request is None or request.grammar is None or not item.is_sampled:
                continue
            error = request.grammar.mask_error(len(request.output_token_ids))
            if error is not None:
                found.append((request, error))
        return found

    def ended(self, requests: Sequence[Request]) -> list[tuple[Request, RequestError | None]]:
        """Return those of `requests` whose outputs are complete, or have left their grammars with an error."""
        found: list[tuple[Request, RequestError | None]] = []
        for request in requests:
            if request.request_id not in self.requests or not request.output_token_ids:
                continue
            grammar = request.grammar
            assert grammar is not None, "only requests with a grammar are added"
            try:
                grammar.advance(request.output_token_ids)
            except RequestError as error:
                found.append((request, error))
                continue
            if grammar.is_stopped:
                found.append((request, None))
        return found


def _pending(item: ScheduledRequest, flights: Iterable[tuple[dict[str, ScheduledRequest], AsyncOutput]]) -> list[int]:
    """Return the tokens of a request that steps in flight have sampled."""
    tokens = []
    for sampled, result in flights:
        one = sampled.get(item.request_id)
        if one is not None and one.epoch == item.epoch:
            found = result.get().token_ids
            if item.request_id in found:
                tokens.append(found[item.request_id])
    return tokens
