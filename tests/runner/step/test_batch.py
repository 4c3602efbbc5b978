"""A step's requests as numbers."""

from __future__ import annotations

from piecegraph.runner.attention.interface.cache_spec import Reach
from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest
from piecegraph.runner.step.batch import build_batch, host_batch
from tests.runner.device_state import BLOCK_SIZE, states

MIXED = (
    ScheduledRequest("decode", 1, 5, True, 1),
    ScheduledRequest("prompt", 3, 0, True, 2),
    ScheduledRequest("chunk", 2, 4, False, 3),
)


def test_mixed_batch() -> None:
    batch = build_batch(MIXED)
    assert batch.request_ids == ("decode", "prompt", "chunk")
    assert batch.query_lens == (1, 3, 2)
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.num_decode_reqs) == (3, 6, 3, 1)


def test_host_batch_places_every_row_and_pads() -> None:
    made = states(keeps_host_blocks=True)
    host = host_batch(MIXED, made, BLOCK_SIZE, num_tokens=8)
    assert host.query_start_loc == (0, 1, 4, 6)
    assert host.seq_lens == (6, 3, 6)
    assert host.slot_mapping.tolist() == [2 * 4 + 1, 36, 37, 38, 1 * 4 + 0, 1 * 4 + 1, PAD_SLOT_ID, PAD_SLOT_ID]
    assert host.block_table[0, :2].tolist() == [7, 2]


def test_the_host_follows_blocks_that_come_later() -> None:
    made = states(keeps_host_blocks=True)
    made.add_blocks("decode", 2, [8, 5])
    made.apply_writes()
    assert made.host_blocks("decode") == [7, 2, 8, 5] == made.block_table[0, made.row("decode"), :4].tolist()


def test_a_group_has_its_own_blocks_on_the_host() -> None:
    made = states(keeps_host_blocks=True, num_groups=2)
    made.add_blocks("decode", 2, [8], group=1)
    made.apply_writes()
    row = made.row("decode")
    assert made.host_blocks("decode", 0) == [7, 2] == made.block_table[0, row, :2].tolist()
    assert made.host_blocks("decode", 1) == [17, 12, 8] == made.block_table[1, row, :3].tolist()
    first, second = (
        host_batch(MIXED, made, BLOCK_SIZE, 8, group=group, reaches=frozenset({Reach(group)})) for group in (0, 1)
    )
    assert second.slot_mapping.tolist() == [slot + 40 if slot >= 0 else slot for slot in first.slot_mapping.tolist()]
    assert (first.reaches, second.reaches) == (frozenset({Reach(0)}), frozenset({Reach(1)}))


def test_pages_of_later_blocks_follow_those_before() -> None:
    made = states(keeps_host_blocks=True, pages_per_block=2)
    made.add_blocks("decode", 2, [8])
    made.apply_writes()
    pages = [14, 15, 4, 5, 16, 17]
    assert made.host_blocks("decode") == pages == made.block_table[0, made.row("decode"), :6].tolist()
