"""Rows of words reach the device together, at any width, and what was there before stays."""

from __future__ import annotations

import struct

import pytest
import torch

from piecegraph.runner.device_memory.host_memory.host_copy import to_device
from piecegraph.runner.sampling.options import staged_rows
from piecegraph.runner.sampling.options.staged_rows import StagedRows, float_word, long_words

CPU = torch.device("cpu")


def test_a_longer_row_widens_the_table() -> None:
    """Rows are filled up with their last words, those of before too."""
    table = StagedRows(3, CPU)
    assert table.words.shape == (3, 0)
    table.stage(0, [1, 2, 3])
    table.apply_staged_writes()
    assert table.words.tolist() == [[1, 2, 3, 3], [0] * 4, [0] * 4]
    table.stage(2, [4, 5, 6, 7, 8])
    table.apply_staged_writes()
    assert table.words.tolist() == [[1, 2, 3, 3, 3, 3, 3, 3], [0] * 8, [4, 5, 6, 7, 8, 8, 8, 8]]


def test_pairs_are_repeated_as_pairs() -> None:
    table = StagedRows(2, CPU, unit=2)
    table.stage(0, [1, 10])
    table.apply_staged_writes()
    table.stage(1, [2, 20, 3, 30, 4, 40])
    table.apply_staged_writes()
    assert table.words.tolist() == [[1, 10] * 4, [2, 20, 3, 30, 4, 40, 4, 40]]


def test_one_copy_for_all_rows_and_none_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def counted(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        copies.append(values)
        return to_device(values, dtype, device)

    monkeypatch.setattr(staged_rows, "to_device", counted)
    table = StagedRows(4, CPU, width=2)
    table.stage(1, [1, 2])
    table.stage(3, [3, 4])
    table.stage(1, [5, 6])
    table.stage(0, [7, 8])
    table.discard(0)
    for _ in range(2):
        table.apply_staged_writes()
    assert len(copies) == 1
    assert table.words.tolist() == [[0, 0], [5, 6], [0, 0], [3, 4]]


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-5, float("inf"), float("-inf")])
def test_floats_travel_as_their_bits(value: float) -> None:
    assert torch.tensor(float_word(value), dtype=torch.int32).view(torch.float32) == torch.tensor(value)


def test_a_number_too_large_for_float32_becomes_its_largest() -> None:
    (largest,) = struct.unpack("<f", struct.pack("<i", float_word(1e300)))
    assert largest == torch.finfo(torch.float32).max
    assert float_word(-1e300) == float_word(-largest)


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 + 5, 2**63 - 1])
def test_long_numbers_travel_as_two_words(value: int) -> None:
    assert int(torch.tensor(long_words(value), dtype=torch.int32).view(torch.int64)) == value
