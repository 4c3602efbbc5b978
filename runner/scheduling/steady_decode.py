"""Requests that decode side by side, step after step: what is the same in each step is worked out once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler_output import ScheduledDecodes


class SteadyDecode:
    """Running requests of which each computes one token a step and draws the next, until the scheduler drops this.

    It holds the requests' counts in arrays, so that who needs a block, who fills one and who has all its tokens is
    found without looking at each. A step changes no list or tuple of it, so the same ones mean the same requests.
    Nor does it change the requests: see Note [late counts]. Whoever lets go of this calls `dissolve`.
    """

    def __init__(self, requests: Sequence[Request], ranks: Sequence[int]) -> None:
        """`requests`, one or more in the order they are computed in: all but the last of their tokens, known or
        pending, is computed. `ranks`: which of them is the first, second, ... to be given what is asked for."""
        self._num_unsettled = 0  # steps scheduled since `settle`
        self._columns: list[Sequence[int]] = []  # tokens of steps told since then
        self._set_requests(list(requests))
        self._num_computed = np.array([request.settled_num_computed_tokens for request in requests])
        self._num_slots = np.array([request.num_slots for request in requests])
        self._max_total = np.array([request.max_total_tokens for request in requests])
        self._ranks = np.array(ranks)
        self._set_steps_left()

    def __len__(self) -> int:
        return len(self.requests)

    def drop(self, request: Request) -> None:
        """Go on without `request`; harmless if it is none of these."""
        if request.kept_by is self:
            self._keep(np.arange(len(self.requests)) != self.requests.index(request))

    def dissolve(self) -> None:
        """Leave the requests as if each step had changed them."""
        self.settle()
        for request in self.requests:
            request.kept_by = None

    def settle(self) -> None:
        """See `Settles`."""
        num_steps, columns = self._num_unsettled, self._columns
        if num_steps:
            self._num_unsettled = 0
            for request in self.requests:
                request.settled_num_computed_tokens += num_steps
                request.settled_num_tokens_with_pending += num_steps
        if len(columns) == 1:
            deque(map(list.append, self._outputs, columns[0]), maxlen=0)  # a loop without Python in it
            columns.clear()
        elif columns:
            deque(map(list.extend, self._outputs, zip(*columns, strict=True)), maxlen=0)
            columns.clear()

    def drop_complete(self) -> None:
        """Go on without those that have all their tokens, known or pending."""
        if self._steps_left == 0:
            self._keep(self._num_computed + 1 < self._max_total)

    def without_slot(self) -> list[int]:
        """Places in `requests` of those that hold no block for their next token, by rank."""
        places = (self._num_computed >= self._num_slots).nonzero()[0]
        by_rank: list[int] = places[self._ranks[places].argsort()].tolist()
        return by_rank

    def update_slots(self, places: Sequence[int]) -> None:
        """Take note that requests have got blocks."""
        for place in places:
            self._num_slots[place] = self.requests[place].num_slots

    def advance(self) -> ScheduledDecodes:
        """Schedule the next token of each."""
        before = self._num_computed
        self._num_computed = before + 1
        self._steps_left -= 1
        self._num_unsettled += 1
        return ScheduledDecodes(self.request_ids, self._epochs, before)

    def append(self, token_ids: Sequence[int]) -> None:
        """Tell the tokens of a step of these very requests. Keeps `token_ids`, which must not change."""
        assert len(token_ids) == len(self.requests), (len(token_ids), len(self.requests))
        self._columns.append(token_ids)

    def _keep(self, is_kept: npt.NDArray[np.bool_]) -> None:
        self.dissolve()
        self._set_requests([self.requests[place] for place in np.flatnonzero(is_kept).tolist()])
        self._num_computed = self._num_computed[is_kept]
        self._num_slots = self._num_slots[is_kept]
        self._max_total = self._max_total[is_kept]
        self._ranks = self._ranks[is_kept]
        self._set_steps_left()

    def _set_requests(self, requests: list[Request]) -> None:
        self.requests: Sequence[Request] = requests
        self.request_ids = tuple([request.request_id for request in requests])
        self._epochs = tuple([request.epoch for request in requests])
        self._outputs = [request.settled_output_token_ids for request in requests]
        for request in requests:
            request.kept_by = self

    def _set_steps_left(self) -> None:
        """Steps until the first of them has all its tokens."""
        self._steps_left = int((self._max_total - self._num_computed).min()) - 1 if self.requests else 0
