"""One step's work, as the scheduler passes it to the model runner: plain frozen values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from piecegraph.runner.common.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.scheduling.lora_slots import LoraAssignment


class ScheduledRequest(NamedTuple):
    """One request's part of a step.

    This is a named tuple, not a dataclass: one is made for each request and step, and a frozen dataclass takes several
    times as long to make.
    """

    request_id: str
    num_tokens: int  # to compute in this step, 1 or more
    num_computed_tokens: int  # before this step
    is_sampled: bool  # True: its last token is computed, so the next one is drawn
    epoch: int  # number of its admission, by which the scheduler recognises stale steps


_make_scheduled = partial(tuple.__new__, ScheduledRequest)
"""A constructor from the fields, without a Python call for each."""


class ScheduledDecodes(Sequence[ScheduledRequest]):
    """The parts of requests that all compute one token and draw the next, in columns; immutable.

    Most steps are of this kind, and make no object for each request. An instance equals any sequence of the same parts.
    Steps of the same requests share `request_ids`, so the batch can be recognised by identity.
    """

    __slots__ = ("_epochs", "num_computed", "request_ids")
    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __init__(
        self, request_ids: tuple[str, ...], epochs: tuple[int, ...], num_computed: npt.NDArray[np.int64]
    ) -> None:
        self.request_ids = request_ids
        self._epochs = epochs
        self.num_computed = num_computed  # [num_reqs], tokens before this step

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        columns = zip(self.request_ids, repeat(1), self.num_computed.tolist(), repeat(True), self._epochs)
        return map(_make_scheduled, columns)

    @overload
    def __getitem__(self, at: int) -> ScheduledRequest: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[ScheduledRequest, ...]: ...
    def __getitem__(self, at: int | slice) -> ScheduledRequest | tuple[ScheduledRequest, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        return ScheduledRequest(self.request_ids[at], 1, int(self.num_computed[at]), True, self._epochs[at])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))


class SampledTokens(Mapping[str, int]):
    """The tokens of a step by request id, in columns: `token_ids[i]` is the token of `request_ids[i]`."""

    __slots__ = ("_by_id", "request_ids", "token_ids")

    def __init__(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        assert len(request_ids) == len(token_ids), (len(request_ids), len(token_ids))
        self.request_ids = request_ids
        self.token_ids = token_ids
        self._by_id: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.request_ids)

    def __getitem__(self, request_id: str) -> int:
        return self.as_dict()[request_id]

    def __repr__(self) -> str:
        return repr(self.as_dict())

    def as_dict(self) -> dict[str, int]:
        """Return the same mapping as a dictionary, read-only for callers. Made at the first call."""
        if self._by_id is None:
            self._by_id = dict(zip(self.request_ids, self.token_ids, strict=True))
        return self._by_id


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRequest:
    """A request that enters the running set in this step, new or resumed, with everything the device needs."""

    request_id: str
    token_ids: Sequence[int]  # all known tokens: prompt, and output if it ran before; read-only
    num_prompt_tokens: int
    num_computed_tokens: int  # of a cached prefix; its blocks come first in `block_ids`
    block_ids: tuple[tuple[int, ...], ...]  # per group; UNREAD_BLOCK before a window
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_embeds: torch.Tensor | None = None  # [num_prompt_tokens, size] on the CPU; None: the prompt is token ids
    lora: LoraAssignment | None = None  # None: it runs without an adapter


class NewBlocks(NamedTuple):
    """Blocks to append to the table of a request that ran before this step. A named tuple for speed."""

    request_id: str
    group: int
    start: int  # index in the table of the first
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's work: requests with one token first, so that decodes are adjacent.

    The runner applies `removed`, then `added` (a request may be in both), then `new_blocks`. An output that
    schedules nothing has no other content either; its removals come with the next output that is not empty.
    """

    step: int  # counts outputs that schedule something, from 1; an empty output repeats the last number
    scheduled: Sequence[ScheduledRequest] = ()  # a tuple, or ScheduledDecodes
    added: tuple[AddedRequest, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    removed: tuple[str, ...] = ()  # ids that left the running set: finished, aborted, preempted
    num_drafts: Mapping[str, int] = field(default_factory=dict)  # of `num_tokens`, those that are drafts, if any
    drafts_next: bool = True  # whether the next step verifies drafts, which a draft model has to make now

    @property
    def is_empty(self) -> bool:
        """True if the step schedules no request."""
        return not self.scheduled

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step computes."""
        if isinstance(self.scheduled, ScheduledDecodes):
            return len(self.scheduled)
        return sum([item.num_tokens for item in self.scheduled])

    @property
    def sampled(self) -> tuple[ScheduledRequest, ...]:
        """The requests for which a token is drawn, in the order of `scheduled`."""
        return tuple([item for item in self.scheduled if item.is_sampled])
