"""One step's work, as the scheduler tells it to the model runner. Plain frozen values, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piecegraph.runner.sampling_params import SamplingParams


class ScheduledRequest(NamedTuple):
    """One request's part of a step. A named tuple, not a dataclass: one is made for each request and step, and a
    frozen dataclass takes several times as long to make.
    """

    request_id: str
    num_tokens: int  # to compute in this step, 1 or more
    num_computed_tokens: int  # before this step
    is_sampled: bool  # its last token runs, so a next one is drawn
    epoch: int  # of its admission; the scheduler's own, to know stale steps by


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRequest:
    """A request that enters the running set in this step, new or resumed; all the device needs of it."""

    request_id: str
    token_ids: Sequence[int]  # all known tokens: prompt, and output if it ran before; not to be changed
    num_prompt_tokens: int
    num_computed_tokens: int  # of a cached prefix; its blocks come first in `block_ids`
    block_ids: tuple[tuple[int, ...], ...]  # per group; UNREAD_BLOCK where a window has passed
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()


class NewBlocks(NamedTuple):
    """Blocks to append to the table of a request that ran before this step. A named tuple for the same reason."""

    request_id: str
    group: int
    start: int  # index in the table of the first
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's work: requests with one token first, so that decodes are neighbours.

    The runner applies `removed`, then `added` (a request may be in both), then `new_blocks`. An output that
    schedules nothing is wholly empty; what it would have removed comes with the next that is not.
    """

    step: int  # counts outputs that schedule something, from 1; an empty one repeats the last number
    scheduled: tuple[ScheduledRequest, ...] = ()
    added: tuple[AddedRequest, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    removed: tuple[str, ...] = ()  # ids that left the running set: finished, aborted, preempted

    @property
    def is_empty(self) -> bool:
        return not self.scheduled

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.scheduled])

    @property
    def sampled(self) -> tuple[ScheduledRequest, ...]:
        """Those a token is drawn for, in the order of `scheduled`."""
        return tuple([item for item in self.scheduled if item.is_sampled])
