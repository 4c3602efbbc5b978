"""Segments in batches leave what they leave one after the other, and their rows are found on the device."""

from __future__ import annotations

import random

import torch

from piecegraph.runner.state_layers.libraries.segments import Segment, independent, ragged_rows


def state_after(segments: list[tuple[Segment, ...]]) -> tuple[dict[int, str], dict[Segment, str]]:
    """Run batches over blocks that hold the names of what wrote them; return the blocks, and what each segment read."""
    blocks: dict[int, str] = {}
    read: dict[Segment, str] = {}
    for batch in segments:
        found = {each: blocks.get(each.read, f"old {each.read}") for each in batch}
        read |= found
        written = [each.write for each in batch if each.write >= 0]
        assert len(set(written)) == len(written)
        blocks |= {each.write: f"{each} from {found[each]}" for each in batch if each.write >= 0}
    return blocks, read


def test_batches_are_as_their_segments_in_order() -> None:
    drawn = random.Random(0)
    depths = set()
    for _ in range(300):
        count = drawn.randint(1, 7)
        segments = [Segment(i, i + 1, drawn.randint(-1, 5), drawn.randint(-1, 5)) for i in range(count)]
        batches = independent(segments)
        assert sorted(each for batch in batches for each in batch) == segments
        assert state_after(list(batches)) == state_after([(each,) for each in segments])
        depths.add(len(batches))
    assert len(depths) > 3


def test_texts_of_their_own_run_together() -> None:
    """Two prompts of two blocks each: first both first halves, then both others; the third begins where one ends."""
    first = [Segment(0, 4, -1, 1), Segment(4, 6, 1, 2)]
    second = [Segment(6, 10, -1, 3), Segment(10, 11, 3, 4)]
    third = [Segment(11, 12, 1, 5)]
    assert independent([*first, *second, *third]) == ((first[0], second[0]), (first[1], second[1], third[0]))


def test_rows_of_a_batch() -> None:
    rows = ragged_rows([Segment(3, 5, -1, 1), Segment(8, 138, -1, 2)], torch.device("cpu"))
    assert rows.ranges == ((3, 5), (8, 138)) and rows.rows.tolist() == [3, 4, *range(8, 138)]
    assert rows.cu_seqlens.tolist() == [0, 2, 132]
    assert rows.chunk_indices.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2]]
    assert rows.padded is not None and rows.is_row is not None and rows.unpadded is not None
    assert rows.padded.shape == (2, 130) and rows.padded[0, :4].tolist() == [0, 1, 1, 1]
    assert rows.is_row.sum(-1).tolist() == [2, 130]
    values = torch.arange(132)
    assert torch.equal(values[rows.padded].flatten()[rows.unpadded], values)


def test_one_segment_needs_no_padding() -> None:
    rows = ragged_rows([Segment(3, 5, -1, 1)], torch.device("cpu"))
    assert (rows.padded, rows.is_row, rows.unpadded) == (None, None, None)


def test_rows_that_follow_one_another_are_a_slice() -> None:
    x = torch.arange(20).unsqueeze(1)
    together = ragged_rows([Segment(3, 5, -1, 0), Segment(5, 9, -1, 1)], torch.device("cpu"))
    apart = ragged_rows([Segment(3, 5, -1, 0), Segment(6, 9, -1, 1)], torch.device("cpu"))
    for rows, span in ((together, slice(3, 9)), (apart, None)):
        assert rows.span == span and torch.equal(rows.of(x), x[rows.rows])
        out = torch.zeros_like(x)
        rows.write(out, rows.of(x) + 1)
        expected = torch.zeros_like(x)
        expected[rows.rows] = x[rows.rows] + 1
        assert torch.equal(out, expected)
