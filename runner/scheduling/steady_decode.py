"""Requests that decode side by side, step after step: what is the same in each step is worked out once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler_output import ScheduledDecodes

Counts = npt.NDArray[np.int64]


class SteadyDecode:
    """Running requests of which each computes one token a step and draws the next, until the scheduler drops this.

    It holds the requests' counts in arrays, so that who needs a block, who fills one and who has all its tokens is
    found without looking at each. A step changes no list or tuple of it, so the same ones mean the same requests.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        """`requests`, one or more in their order: all but the last of their tokens, known or pending, is computed."""
        self._set_requests(list(requests))
        self._num_computed = np.array([request.num_computed_tokens for request in requests])
        self._num_slots = np.array([request.num_slots for request in requests])
        self._next_registration = np.array([request.next_registration for request in requests])
        self._max_total = np.array([request.max_total_tokens for request in requests])
        self._set_steps_left()

    def __len__(self) -> int:
        return len(self.requests)

    def drop(self, request: Request) -> None:
        """Go on without `request`; harmless if it is none of these."""
        if request in self.requests:
            self._keep(np.arange(len(self.requests)) != self.requests.index(request))

    def drop_complete(self) -> None:
        """Go on without those that have all their tokens, known or pending."""
        if self._steps_left == 0:
            self._keep(self._num_computed + 1 < self._max_total)

    def without_slot(self) -> list[int]:
        """Places in `requests` of those that hold no block for their next token."""
        places: list[int] = np.flatnonzero(self._num_computed >= self._num_slots).tolist()
        return places

    def update_slots(self, place: int) -> None:
        """Take note that a request has got a block."""
        self._num_slots[place] = self.requests[place].num_slots

    def advance(self) -> ScheduledDecodes:
        """Schedule the next token of each. Mutates the requests' counts."""
        before = self._num_computed
        self._num_computed = before + 1
        self._steps_left -= 1
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_tokens_with_pending += 1
        return ScheduledDecodes(self.request_ids, self._epochs, before)

    def append(self, token_ids: Sequence[int]) -> None:
        """Tell the tokens of a step of these very requests."""
        for output, token in zip(self._outputs, token_ids, strict=True):
            output.append(token)

    def registrable(self, num_done: Counts) -> list[int]:
        """Places of those that have filled a block by their first `num_done` tokens."""
        places: list[int] = np.flatnonzero(num_done >= self._next_registration).tolist()
        return places

    def update_registration(self, place: int) -> None:
        """Take note that a request's blocks are registered as far as they can be."""
        self._next_registration[place] = self.requests[place].next_registration

    def _keep(self, is_kept: npt.NDArray[np.bool_]) -> None:
        self._set_requests([self.requests[place] for place in np.flatnonzero(is_kept).tolist()])
        self._num_computed = self._num_computed[is_kept]
        self._num_slots = self._num_slots[is_kept]
        self._next_registration = self._next_registration[is_kept]
        self._max_total = self._max_total[is_kept]
        self._set_steps_left()

    def _set_requests(self, requests: list[Request]) -> None:
        self.requests: Sequence[Request] = requests
        self.request_ids = tuple([request.request_id for request in requests])
        self._epochs = tuple([request.epoch for request in requests])
        self._outputs = [request.output_token_ids for request in requests]

    def _set_steps_left(self) -> None:
        """Steps until the first of them has all its tokens."""
        self._steps_left = int((self._max_total - self._num_computed).min()) - 1 if self.requests else 0
