"""Requests that decode together, step after step: what is equal in each step is computed once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler_output import ScheduledDecodes


class SteadyDecode:
    """Running requests that each compute one token a step and draw the next, until the scheduler drops the object.

    The requests' counts are in arrays, so that the requests that need a block, fill one or have all their tokens are
    found without a loop over all. A step changes no list or tuple of the object, so an identical list means the same
    requests. Nor does a step change the requests: see Note [late counts]. `dissolve` must be called before the object
    is dropped.
    """

    requests: Sequence[Request]
    _outputs: list[list[int]]  # the requests' own
    _first_lens: list[int]  # how long each output was at first
    _num_settled: int  # tokens that each output has got since

    def __init__(self, requests: Sequence[Request], ranks: Sequence[int]) -> None:
        """Batch `requests`, one or more, in the order in which they are computed.

        All but the last of their tokens, known or pending, are computed. `ranks`: the order in which requests get
        blocks.
        """
        self._num_unsettled = 0  # steps scheduled since `settle`
        self._columns: list[Sequence[int]] = []  # tokens of the steps completed since then
        self._is_settling = False  # True outside of `settle`: an exception has interrupted the call
        self._set_requests(list(requests))
        self._num_computed = np.array([request.settled_num_computed_tokens for request in requests])
        self._num_slots = np.array([request.num_slots for request in requests])
        self._max_total = np.array([request.max_total_tokens for request in requests])
        self._ranks = np.array(ranks)
        self._set_steps_left()

    def __len__(self) -> int:
        return len(self.requests)

    def drop(self, request: Request) -> None:
        """Remove `request`, if it is one of the batch."""
        if request.batched_by is self:
            self._keep(np.arange(len(self.requests)) != self.requests.index(request))

    def dissolve(self) -> None:
        """Bring the requests up to date, and release them."""
        self.settle()
        for request in self.requests:
            request.batched_by = None

    def settle(self) -> None:
        """Bring the `settled_*` fields of the requests up to date (`Settles.settle`)."""
        num_steps, columns = self._num_unsettled, self._columns
        if self._is_settling:
            self._settle_again()
            return
        if not num_steps and not columns:
            return
        self._is_settling = True
        if num_steps:
            for request in self.requests:
                request.settled_num_computed_tokens += num_steps
                request.settled_num_tokens_with_pending += num_steps
            self._num_unsettled = 0
        if len(columns) == 1:
            deque(map(list.append, self._outputs, columns[0]), maxlen=0)  # a loop without Python in it
        elif columns:
            deque(map(list.extend, self._outputs, zip(*columns, strict=True)), maxlen=0)
        self._columns, self._num_settled = [], self._num_settled + len(columns)
        self._is_settling = False

    def drop_complete(self) -> None:
        """Remove the requests that have all their tokens, known or pending."""
        if self._steps_left == 0:
            self._keep(self._num_computed + 1 < self._max_total)

    def without_slot(self) -> list[int]:
        """Return the indices in `requests` of those that hold no block for their next token, by rank."""
        places = (self._num_computed >= self._num_slots).nonzero()[0]
        by_rank: list[int] = places[self._ranks[places].argsort()].tolist()
        return by_rank

    def update_slots(self, places: Sequence[int]) -> None:
        """Read the slots of requests that have got blocks."""
        for place in places:
            self._num_slots[place] = self.requests[place].num_slots

    def advance(self) -> ScheduledDecodes:
        """Schedule the next token of each request."""
        before = self._num_computed
        self._num_computed = before + 1
        self._steps_left -= 1
        self._num_unsettled += 1
        return ScheduledDecodes(self.request_ids, self._epochs, before)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add the tokens of a step of exactly these requests. Keeps `token_ids`, which must not change."""
        assert len(token_ids) == len(self.requests), (len(token_ids), len(self.requests))
        self._columns.append(token_ids)

    def _settle_again(self) -> None:
        """Finish a `settle` that was interrupted. The length of an output determines which tokens it lacks."""
        columns, num_settled = self._columns, self._num_settled
        for place, request in enumerate(self.requests):
            output = self._outputs[place]
            output += [column[place] for column in columns[len(output) - self._first_lens[place] - num_settled :]]
            request.settled_num_computed_tokens = int(self._num_computed[place])
            request.settled_num_tokens_with_pending = request.settled_num_computed_tokens + 1
        self._columns, self._num_settled, self._num_unsettled = [], num_settled + len(columns), 0
        self._is_settling = False

    def _keep(self, is_kept: npt.NDArray[np.bool_]) -> None:
        self.dissolve()
        self._set_requests([self.requests[place] for place in np.flatnonzero(is_kept).tolist()])
        self._num_computed = self._num_computed[is_kept]
        self._num_slots = self._num_slots[is_kept]
        self._max_total = self._max_total[is_kept]
        self._ranks = self._ranks[is_kept]
        self._set_steps_left()

    def _set_requests(self, requests: list[Request]) -> None:
        outputs = [request.settled_output_token_ids for request in requests]
        lens = [len(output) for output in outputs]
        self.request_ids = tuple([request.request_id for request in requests])
        self._epochs = tuple([request.epoch for request in requests])
        self.requests, self._outputs, self._first_lens, self._num_settled = requests, outputs, lens, 0
        for request in requests:
            request.batched_by = self

    def _set_steps_left(self) -> None:
        """Compute the number of steps until the first request has all its tokens."""
        self._steps_left = int((self._max_total - self._num_computed).min()) - 1 if self.requests else 0
