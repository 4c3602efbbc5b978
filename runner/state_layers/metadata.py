"""The description of a step's batch that layers with states read: which state each request begins with and leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, AttentionMetadata
from piecegraph.runner.device_memory.host_memory.host_copy import to_device

NO_STATE = -1
"""The block of a request that begins without a state, and of one whose state is kept nowhere."""


@dataclass(frozen=True, slots=True)
class StateSequence:
    """The rows of one request with several tokens, cut where a state has to be kept."""

    start: int  # row
    read: int  # the block of the state after the token before; NO_STATE: there is no such token
    segments: tuple[tuple[int, int], ...]  # the row after each segment, and the block for the state there


@dataclass(frozen=True, slots=True)
class StateDecodes:
    """The requests with one token each."""

    rows: torch.Tensor  # [num_reqs] int64
    reads: torch.Tensor  # [num_reqs] int64, 0 where there is no state
    is_fresh: torch.Tensor | None  # [num_reqs] bool, True where there is no state; None: there are all
    writes: torch.Tensor  # [num written] int64
    written: torch.Tensor | None  # [num written] int64, the requests whose state is kept; None: all


@dataclass(frozen=True, slots=True)
class StatePlan:
    """A step of one group of layers with states.

    The sequences run first and in order: one may begin with a state that an earlier one leaves. Then the decodes run.
    """

    sequences: tuple[StateSequence, ...]
    decodes: StateDecodes | None  # None: there are none
    num_rows: int  # of requests; those after are padding


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMetadata(AttentionMetadata):
    """A step's batch with its plan."""

    block_size: int  # the kernels' block size, that of a page of the tables
    pages_per_block: int
    planned: StatePlan | None  # None: the tensors, which a graph refills, are read when a layer runs

    def plan(self) -> StatePlan:
        """Return the plan of the batch. Waits for the device unless the host has made it."""
        if self.planned is not None:
            return self.planned
        return state_plan(
            query_start_loc=self.query_start_loc.tolist(),
            seq_lens=self.seq_lens.tolist(),
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            block_size=self.block_size,
            pages_per_block=self.pages_per_block,
            device=self.query_start_loc.device,
        )


@dataclass(frozen=True, slots=True)
class StateMetadataBuilder:
    """A builder of `StateMetadata`; it has no buffers."""

    block_size: int
    pages_per_block: int
    device: torch.device

    def build(self, common: AttentionMetadata) -> StateMetadata:
        """Plan the step on the host, if the host knows the batch: nothing waits for the device."""
        host = common.host
        planned = None
        if host is not None:
            planned = state_plan(
                query_start_loc=host.query_start_loc,
                seq_lens=host.seq_lens,
                block_table=host.block_table,
                slot_mapping=host.slot_mapping,
                block_size=self.block_size,
                pages_per_block=self.pages_per_block,
                device=self.device,
            )
        return self._metadata(common, planned)

    def init_capture(self, common: AttentionMetadata) -> StateMetadata:
        """Return metadata whose batch is read from the buffers at each run."""
        return self._metadata(common, None)

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        """Do nothing: everything is read from the buffers."""

    def _metadata(self, common: AttentionMetadata, planned: StatePlan | None) -> StateMetadata:
        return StateMetadata(
            **{name: getattr(common, name) for name in AttentionMetadata.__dataclass_fields__},
            block_size=self.block_size,
            pages_per_block=self.pages_per_block,
            planned=planned,
        )


def state_plan(
    *,
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,  # [num_reqs, max_blocks] pages
    slot_mapping: torch.Tensor,  # [num_tokens], of which only PAD_SLOT_ID is read
    block_size: int,
    pages_per_block: int,
    device: torch.device,
) -> StatePlan:
    """Return the plan of a batch. A request whose tokens are cached nowhere begins without a state and leaves none."""
    sequences: list[StateSequence] = []
    decodes: list[tuple[int, int, int]] = []  # row, read, write
    tables = block_table.tolist()
    for request, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[request], query_start_loc[request + 1]
        if start == end:
            continue
        if int(slot_mapping[start]) == PAD_SLOT_ID:
            if end - start == 1:
                decodes.append((start, NO_STATE, NO_STATE))
            else:
                sequences.append(StateSequence(start, NO_STATE, ((end, NO_STATE),)))
            continue
        blocks = [page // pages_per_block for page in tables[request][::pages_per_block]]
        sequence = _sequence(start, seq_len - (end - start), seq_len, blocks, block_size * pages_per_block)
        if end - start == 1:
            decodes.append((start, sequence.read, sequence.segments[-1][1]))
        else:
            sequences.append(sequence)
    return StatePlan(
        sequences=tuple(sequences),
        decodes=_decodes(decodes, device) if decodes else None,
        num_rows=query_start_loc[len(seq_lens)],
    )


def _sequence(start: int, num_computed: int, seq_len: int, blocks: Sequence[int], block_size: int) -> StateSequence:
    """Return the plan of a request whose tokens `num_computed:seq_len` are the rows from `start` on."""
    segments: list[tuple[int, int]] = []
    position = num_computed
    while position < seq_len:
        index = position // block_size
        position = min((index + 1) * block_size, seq_len)
        row = start + position - num_computed
        if segments and segments[-1][1] == blocks[index]:
            segments.pop()  # a request with one slot keeps the last state only
        segments.append((row, blocks[index]))
    read = blocks[(num_computed - 1) // block_size] if num_computed else NO_STATE
    return StateSequence(start, read, tuple(segments))


def _decodes(decodes: Sequence[tuple[int, int, int]], device: torch.device) -> StateDecodes:
    rows, reads, writes = zip(*decodes, strict=True)
    is_fresh = [read == NO_STATE for read in reads]
    written = [place for place, write in enumerate(writes) if write != NO_STATE]
    return StateDecodes(
        rows=to_device(rows, torch.int64, device),
        reads=to_device([max(read, 0) for read in reads], torch.int64, device),
        is_fresh=to_device(is_fresh, torch.bool, device) if any(is_fresh) else None,
        writes=to_device([writes[place] for place in written], torch.int64, device),
        written=None if len(written) == len(writes) else to_device(written, torch.int64, device),
    )
