"""The map from rows to slots: where it is read, and how rows are grouped on a CPU."""

from __future__ import annotations

import torch

from piecegraph.runner.lora.slot_map import NO_ADAPTER, SlotMap


def filled() -> SlotMap:
    """Return a map of three requests, in the state rows 2, 0 and 1, that compute 1, 2 and 3 tokens."""
    made = SlotMap(max_num_tokens=8, max_num_reqs=4, device=torch.device("cpu"))
    for row, slot in ((2, 0), (0, NO_ADAPTER), (1, 3)):
        made.assign(row, slot)
    made.apply_writes()
    rows = torch.tensor([2, 0, 1, -1], dtype=torch.int32)
    made.prepare(rows, torch.tensor([0, 1, 3, 6, 6], dtype=torch.int32), num_tokens=8, num_reqs=4)
    return made


def test_tokens_and_logits_have_the_slots_of_their_requests() -> None:
    rows = filled().rows(8, 4)
    assert rows.tokens.tolist() == [0, -1, -1, 3, 3, 3, -1, -1]
    assert rows.logits.tolist() == [0, -1, 3, -1]
    assert [(slot, index.tolist()) for slot, index in rows.groups("tokens", 8)] == [(0, [0]), (3, [3, 4, 5])]
    assert [(slot, index.tolist()) for slot, index in rows.groups("logits", 3)] == [(0, [0]), (3, [2])]


def test_more_rows_of_logits_have_the_slots_of_their_tokens() -> None:
    rows = filled().rows(6, torch.tensor([0, 2, 5, 4, 1]))
    assert rows.logits.tolist() == [0, -1, 3, 3, -1]


def test_what_is_staged_can_be_dropped() -> None:
    made = filled()
    made.assign(2, 1)
    made.clear_staged()
    made.apply_writes()
    assert made.tensors()["adapters' slots"].tolist() == [-1, 3, 0, 0]


def test_rows_of_drafts_have_the_slots_of_their_tokens_in_place() -> None:
    made = SlotMap(max_num_tokens=8, max_num_reqs=3, max_num_logits=6, device=torch.device("cpu"))
    made.assign(0, NO_ADAPTER)
    made.assign(1, 2)
    made.apply_writes()
    made.prepare(torch.tensor([0, 1]), torch.tensor([0, 2, 5]), num_tokens=6, num_reqs=2)
    address = made.tensors()["slots of logits"].data_ptr()
    made.prepare_logits(torch.tensor([1, 2, 3, 4, 0]))
    rows = made.rows(6, 5)
    assert rows.logits.tolist() == [-1, 2, 2, 2, -1] and rows.logits.data_ptr() == address
