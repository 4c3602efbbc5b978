"""The description of a step's batch that layers with states read: which state each request begins with and leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch

from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, AttentionMetadata, HostBatch
from piecegraph.runner.device_memory.host_memory.host_copy import to_device
from piecegraph.runner.state_layers.libraries.library_calls import LibraryCall
from piecegraph.runner.state_layers.libraries.segments import RaggedRows, Segment, independent, ragged_rows
from piecegraph.runner.state_layers.recent_states import DecodingRows, place_of

NO_STATE = -1
"""The block of a request that begins without a state, and of one whose state is kept nowhere."""


@dataclass(frozen=True, slots=True)
class StateSequence:
    """The rows of one request with several tokens, cut where a state has to be kept."""

    start: int  # row
    read: int  # the block of the state after the token before; NO_STATE: there is no such token
    segments: tuple[tuple[int, int], ...]  # the row after each segment, and the block for the state there

    def parts(self) -> tuple[Segment, ...]:
        """Return the segments, each of which but the first begins with the state that the one before leaves."""
        starts = [self.start, *[end for end, _ in self.segments]]
        reads = [self.read, *[write for _, write in self.segments]]
        return tuple([Segment(starts[i], end, reads[i], write) for i, (end, write) in enumerate(self.segments)])


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """The blocks of the states with which several texts begin, and of those that they leave."""

    reads: torch.Tensor  # [num_texts] int64, 0 where there is no state
    is_fresh: torch.Tensor | None  # [num_texts] bool, True where there is no state; None: there are all
    writes: torch.Tensor  # [num written] int64
    written: torch.Tensor | None  # [num written] int64, the texts whose state is kept; None: all

    def load(self, cache: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the states `[num_texts, ...]` of each of a layer's tensors; where there is none, zeros."""
        states = [kept[self.reads] for kept in cache]
        if self.is_fresh is None:
            return states
        return [torch.where(self.is_fresh.view(-1, *[1] * (state.dim() - 1)), 0, state) for state in states]

    def store(self, cache: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> None:
        """Write the states `[num_texts, ...]` to their blocks."""
        for kept, state in zip(cache, states, strict=True):
            kept[self.writes] = (state if self.written is None else state[self.written]).to(kept.dtype)


@dataclass(frozen=True, slots=True)
class StateDecodes:
    """The requests with one token each."""

    rows: torch.Tensor  # [num_reqs] int64
    blocks: StateBlocks


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Segments of sequences that a library or a kernel computes in one call."""

    ragged: RaggedRows
    blocks: StateBlocks


@dataclass(frozen=True, slots=True)
class StateRound:
    """One token each of decoding requests whose states can be taken back; see `recent_states`."""

    rows: torch.Tensor  # [num_reqs] int64
    reads: torch.Tensor  # [num_reqs] int64, places of last states, 0 where the state is in a block
    blocks: torch.Tensor | None  # [num_reqs] int64, the blocks of states, 0 where it is a last one; None: all are
    is_in_block: torch.Tensor | None  # [num_reqs] bool; None: nowhere
    writes: torch.Tensor  # [num_reqs] int64, places
    at_boundary: torch.Tensor | None  # [num_boundaries] int64, requests whose token ends a block; None: none
    boundaries: torch.Tensor | None  # [num_boundaries] int64, these blocks


@dataclass(frozen=True, slots=True)
class StatePlan:
    """A step of one group of layers with states.

    The sequences run first and in order: one may begin with a state that an earlier one leaves. Then the decodes run,
    and the rounds, in order.
    """

    sequences: tuple[StateSequence, ...]
    batches: tuple[StateBatch, ...]  # the same, for layers that run by batches; empty if there are none
    decodes: StateDecodes | None  # None: there are none
    rounds: tuple[StateRound, ...]  # the first, second, ... tokens of decoding requests; empty without drafts
    num_rows: int  # of requests; those after are padding


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMetadata(AttentionMetadata):
    """A step's batch with its plan."""

    block_size: int  # the kernels' block size, that of a page of the tables
    pages_per_block: int
    decoding: DecodingRows | None  # None: no state can be taken back
    planned: StatePlan | None  # None: the tensors, which a graph refills, are read when a layer runs
    library_calls: Mapping[str, LibraryCall] = field(default_factory=dict)  # by layer, if a library computes it
    num_kernel_decodes: int = 0  # leading requests with one row each, which kernels compute after the plan's

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
            decoding=self.decoding,
            first_request=self.num_kernel_decodes,
        )


@dataclass(frozen=True, slots=True)
class StateMetadataBuilder:
    """A builder of `StateMetadata`; it has no buffers of its own."""

    block_size: int
    pages_per_block: int
    device: torch.device
    decoding: DecodingRows | None = None  # None: no state can be taken back
    library_calls: Mapping[str, LibraryCall] = field(default_factory=dict)  # by layer, if a library computes it
    convolves_batches: bool = False  # some layer is a convolution alone, which a kernel computes by batches
    kernels_run_decodes: bool = False  # requests with one row each run as kernels, beside prompts too

    def build(self, common: AttentionMetadata) -> StateMetadata:
        """Plan the step on the host, if the host knows the batch: nothing waits for the device."""
        host = common.host
        planned = None
        num_kernel_decodes = common.num_decode_reqs if self.kernels_run_decodes else 0
        kernels_run_all = 0 < num_kernel_decodes == common.num_reqs
        if host is not None and not kernels_run_all:
            planned = state_plan(
                query_start_loc=host.query_start_loc,
                seq_lens=host.seq_lens,
                block_table=host.block_table,
                slot_mapping=host.slot_mapping,
                block_size=self.block_size,
                pages_per_block=self.pages_per_block,
                device=self.device,
                decoding=self.decoding,
                host=host,
                has_batches=bool(self.library_calls) or self.convolves_batches,
                first_request=num_kernel_decodes,
            )
        return self._metadata(common, planned, num_kernel_decodes)

    def init_capture(self, common: AttentionMetadata) -> StateMetadata:
        """Return metadata whose batch is read from the buffers at each run."""
        return self._metadata(common, None)

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        """Do nothing: everything is read from the buffers."""

    def _metadata(
        self, common: AttentionMetadata, planned: StatePlan | None, num_kernel_decodes: int = 0
    ) -> StateMetadata:
        return StateMetadata(
            **{name: getattr(common, name) for name in AttentionMetadata.__dataclass_fields__},
            block_size=self.block_size,
            pages_per_block=self.pages_per_block,
            decoding=self.decoding,
            planned=planned,
            library_calls=self.library_calls,
            num_kernel_decodes=num_kernel_decodes,
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
    decoding: DecodingRows | None = None,
    host: HostBatch | None = None,
    has_batches: bool = False,
    first_request: int = 0,
) -> StatePlan:
    """Return the plan of a batch. A request whose tokens are cached nowhere begins without a state and leaves none.

    `decoding`: the requests that decode, if their states can be taken back; read from `host` if it is given.
    `has_batches`: sequences are planned for libraries and kernels that run batches, too. Requests before
    `first_request` are left out.
    """
    sequences: list[StateSequence] = []
    decodes: list[tuple[int, int, int]] = []  # row, read, write
    rounds: list[list[_RoundToken]] = []
    tables = block_table.tolist()
    state_rows, prefill_lens = ((), ()) if decoding is None else decoding.of_batch(len(seq_lens), host)
    for request in range(first_request, len(seq_lens)):
        seq_len, start, end = seq_lens[request], query_start_loc[request], query_start_loc[request + 1]
        if start == end:
            continue
        if int(slot_mapping[start]) == PAD_SLOT_ID:
            if end - start == 1:
                decodes.append((start, NO_STATE, NO_STATE))
            else:
                sequences.append(StateSequence(start, NO_STATE, ((end, NO_STATE),)))
            continue
        blocks = [page // pages_per_block for page in tables[request][::pages_per_block]]
        num_computed = seq_len - (end - start)
        if decoding is not None and num_computed >= prefill_lens[request] > 0:
            is_first = num_computed == prefill_lens[request]
            places = [place_of(state_rows[request], p, decoding.num_places) for p in range(num_computed - 1, seq_len)]
            _add_to_rounds(rounds, start, num_computed, places, blocks, block_size * pages_per_block, is_first=is_first)
            continue
        sequence = _sequence(start, num_computed, seq_len, blocks, block_size * pages_per_block)
        if end - start == 1:
            decodes.append((start, sequence.read, sequence.segments[-1][1]))
        else:
            sequences.append(sequence)
    return StatePlan(
        sequences=tuple(sequences),
        batches=_batches(sequences, device) if has_batches else (),
        decodes=_decodes(decodes, device) if decodes else None,
        rounds=tuple([_round(tokens, device) for tokens in rounds]),
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
    return StateDecodes(rows=to_device(rows, torch.int64, device), blocks=_blocks(reads, writes, device))


def _batches(sequences: Sequence[StateSequence], device: torch.device) -> tuple[StateBatch, ...]:
    segments = tuple(chain.from_iterable([sequence.parts() for sequence in sequences]))
    return tuple(
        [
            StateBatch(
                ragged=ragged_rows(batch, device),
                blocks=_blocks([each.read for each in batch], [each.write for each in batch], device),
            )
            for batch in independent(segments)
        ]
    )


def _blocks(reads: Sequence[int], writes: Sequence[int], device: torch.device) -> StateBlocks:
    is_fresh = [read == NO_STATE for read in reads]
    written = [place for place, write in enumerate(writes) if write != NO_STATE]
    return StateBlocks(
        reads=to_device([max(read, 0) for read in reads], torch.int64, device),
        is_fresh=to_device(is_fresh, torch.bool, device) if any(is_fresh) else None,
        writes=to_device([writes[place] for place in written], torch.int64, device),
        written=None if len(written) == len(writes) else to_device(written, torch.int64, device),
    )


class _RoundToken(NamedTuple):
    """One token of a decoding request, and where its states are."""

    row: int
    read: int  # a place, or NO_STATE: the state is in a block
    block: int  # that block, or NO_STATE
    write: int  # a place
    boundary: int  # the block that the token ends and whose state is kept, or NO_STATE


def _add_to_rounds(
    rounds: list[list[_RoundToken]],
    start: int,
    num_computed: int,
    places: Sequence[int],
    blocks: Sequence[int],
    block_size: int,
    *,
    is_first: bool,
) -> None:
    """Add the tokens of a request, which are the rows from `start` on, to the rounds, one to each.

    `places`: of the token before them, and of each of them. `is_first`: the token before them is the last of those that
    the request was added with, whose state is in a block. A group with one slot keeps no boundaries; to write them
    does no harm, since its block is read at first only.
    """
    for number in range(len(places) - 1):
        position = num_computed + number
        is_in_block = is_first and number == 0
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(
            _RoundToken(
                row=start + number,
                read=NO_STATE if is_in_block else places[number],
                block=blocks[(position - 1) // block_size] if is_in_block else NO_STATE,
                write=places[number + 1],
                boundary=NO_STATE if (position + 1) % block_size else blocks[position // block_size],
            )
        )


def _round(tokens: Sequence[_RoundToken], device: torch.device) -> StateRound:
    def column(values: Sequence[int]) -> torch.Tensor:
        return to_device([max(value, 0) for value in values], torch.int64, device)

    is_in_block = [token.read == NO_STATE for token in tokens]
    ends = [place for place, token in enumerate(tokens) if token.boundary != NO_STATE]
    return StateRound(
        rows=column([token.row for token in tokens]),
        reads=column([token.read for token in tokens]),
        blocks=column([token.block for token in tokens]) if any(is_in_block) else None,
        is_in_block=to_device(is_in_block, torch.bool, device) if any(is_in_block) else None,
        writes=column([token.write for token in tokens]),
        at_boundary=column(ends) if ends else None,
        boundaries=column([tokens[place].boundary for place in ends]) if ends else None,
    )
