"""Which state each request of a step begins with, and which it leaves."""

from __future__ import annotations

import torch

from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID
from piecegraph.runner.state_layers.metadata import NO_STATE, StatePlan, StateSequence, state_plan
from piecegraph.runner.state_layers.recent_states import DecodingRows


def plan(
    lens: list[tuple[int, int]],
    tables: list[list[int]],
    dummies: tuple[int, ...] = (),
    ratio: int = 1,
    decoding: DecodingRows | None = None,
    first_request: int = 0,
) -> StatePlan:
    """The plan of requests `(computed, tokens of this step)` over blocks of 4 tokens, `ratio` pages each."""
    starts = [0]
    for _, count in lens:
        starts.append(starts[-1] + count)
    slots = torch.zeros(starts[-1] + 3, dtype=torch.int64)
    for request in dummies:
        slots[starts[request] : starts[request + 1]] = PAD_SLOT_ID
    width = max(map(len, tables)) * ratio
    pages = [[block * ratio + page for block in table for page in range(ratio)] for table in tables]
    return state_plan(
        query_start_loc=starts,
        seq_lens=[computed + count for computed, count in lens],
        block_table=torch.tensor([row + [0x7F7F7F] * (width - len(row)) for row in pages]),
        slot_mapping=slots,
        block_size=4 // ratio,
        pages_per_block=ratio,
        device=torch.device("cpu"),
        decoding=decoding,
        first_request=first_request,
    )


def test_a_state_is_left_at_each_boundary_and_at_the_end() -> None:
    for ratio in (1, 2):
        found = plan([(0, 10), (6, 3)], [[5, 6, 7], [1, 2, 3]], ratio=ratio)
        assert found.sequences == (
            StateSequence(0, NO_STATE, ((4, 5), (8, 6), (10, 7))),
            StateSequence(10, 2, ((12, 2), (13, 3))),
        )
        assert found.decodes is None and found.num_rows == 13


def test_one_slot_keeps_the_last_state() -> None:
    (sequence,) = plan([(5, 9)], [[8, 8, 8, 8]]).sequences
    assert sequence == StateSequence(0, 8, ((9, 8),))


def test_single_tokens_run_together() -> None:
    """A first token begins without a state; at a boundary, the state goes from one block to the next."""
    decodes = plan([(4, 1), (0, 1), (6, 1)], [[1, 2], [3], [4, 5]]).decodes
    assert decodes is not None and decodes.rows.tolist() == [0, 1, 2]
    blocks = decodes.blocks
    assert blocks.is_fresh is not None and blocks.is_fresh.tolist() == [False, True, False]
    assert blocks.reads[[0, 2]].tolist() == [1, 5] and blocks.writes.tolist() == [2, 3, 5]
    assert blocks.written is None


def test_requests_before_the_first_are_left_to_kernels() -> None:
    found = plan([(4, 1), (0, 1), (6, 3)], [[1, 2], [3], [4, 5, 6]], first_request=2)
    assert found.decodes is None and [sequence.start for sequence in found.sequences] == [2]
    assert found.num_rows == 5


def test_dummies_leave_nothing_and_padded_requests_have_no_rows() -> None:
    found = plan([(0, 1), (3, 1), (0, 6), (0, 0)], [[9, 9], [4], [9, 9], [0x7F7F7F]], dummies=(0, 2))
    assert found.sequences == (StateSequence(2, NO_STATE, ((8, NO_STATE),)),)
    assert found.decodes is not None and found.decodes.blocks.written is not None
    assert (found.decodes.blocks.writes.tolist(), found.decodes.blocks.written.tolist()) == ([4], [1])
    assert found.num_rows == 8


def test_the_last_states_of_requests_that_decode_have_places() -> None:
    """With 2 drafts a request has 3 places. Requests 0 and 1 decode, in rows 2 and 0, the first of them for the first
    time; request 2 still computes its prompt. The tokens 3 and 7 end blocks of 4.
    """
    rows = DecodingRows(3, torch.tensor([2, 0, 1, -1], dtype=torch.int32), torch.tensor([5, 9, 3], dtype=torch.int32))
    found = plan([(3, 3), (6, 2), (4, 3), (0, 0)], [[7, 8], [5, 6], [3, 4], [0]], decoding=rows)
    assert found.sequences == (StateSequence(5, 3, ((8, 4),)),)
    assert found.decodes is None and len(found.rounds) == 3
    first, second, third = found.rounds
    assert first.is_in_block is not None and first.blocks is not None
    assert (first.rows.tolist(), first.is_in_block.tolist()) == ([0, 3], [True, False])
    assert (first.blocks[0].item(), first.reads[1].item()) == (7, 0 * 3 + 5 % 3)
    assert first.writes.tolist() == [2 * 3 + 3 % 3, 0 * 3 + 6 % 3]
    assert first.boundaries is not None and first.at_boundary is not None
    assert (first.at_boundary.tolist(), first.boundaries.tolist()) == ([0], [7])
    assert (second.rows.tolist(), second.reads.tolist()) == ([1, 4], [6, 0]) and second.is_in_block is None
    assert second.boundaries is not None and second.boundaries.tolist() == [6]
    assert third.rows.tolist() == [2] and third.boundaries is None
