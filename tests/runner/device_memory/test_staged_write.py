"""Staged writes end up as plain assignments in the same order would have put them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecegraph.runner.device_memory import staged_write
from piecegraph.runner.device_memory.host_memory.packed_writes import PackedWrites
from piecegraph.runner.device_memory.host_memory.uva import UvaRing
from piecegraph.runner.device_memory.staged_write import (
    NUMPY_DTYPES,
    RowWrite,
    StagedWriteTensor,
    apply_writes_reference,
    pack_cells,
    pack_writes,
    without_overlaps,
)
from tests.interpreter import interpreted
from tests.runner.no_sync import no_sync

CPU = torch.device("cpu")
NUM_ROWS, WIDTH = 5, 2100  # more than two of the kernel's blocks
Writes = list[tuple[int, int, list[int]]]
Apply = Callable[[torch.Tensor, PackedWrites], None]


@st.composite
def ragged_writes(draw: st.DrawFn, max_length: int = WIDTH) -> Writes:
    """(row, start, values); few starts, so that many overlap. All values differ, so that order shows."""
    writes: Writes = []
    next_value = 1
    for _ in range(draw(st.integers(0, 12))):
        start = draw(st.sampled_from([0, 1, 3, 7, 1020, WIDTH - 8, WIDTH]))
        length = min(draw(st.sampled_from([0, 1, 2, 5, 9, max_length])), WIDTH - start)
        writes.append((draw(st.integers(0, NUM_ROWS - 1)), start, list(range(next_value, next_value + length))))
        next_value += length
    return writes


def assigned(writes: Writes, dtype: torch.dtype) -> torch.Tensor:
    """Return the result of the writes by plain indexing."""
    expected = torch.zeros(NUM_ROWS, WIDTH, dtype=dtype)
    for row, start, values in writes:
        expected[row, start : start + len(values)] = torch.tensor(values, dtype=dtype)
    return expected


@given(writes=ragged_writes(), dtype=st.sampled_from([*NUMPY_DTYPES]))
@settings(deadline=None)
def test_staged_writes_equal_plain_assignments(writes: Writes, dtype: torch.dtype) -> None:
    """Writes of every dtype and length, overlapping or not, as lists or arrays, in one or two applies."""
    table = StagedWriteTensor((NUM_ROWS, WIDTH), dtype, CPU)
    for i, (row, start, values) in enumerate(writes):
        table.stage_write(row, start, values if i % 2 else np.array(values, dtype=np.int64))
        if i == 7:
            table.apply_write()
    table.apply_write()
    assert torch.equal(table.gpu, assigned(writes, dtype))


@given(
    cells=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=12),
    dtype=st.sampled_from([*NUMPY_DTYPES]),
)
@settings(deadline=None)
def test_staged_cells_equal_writes_of_one_value(cells: list[tuple[int, int, bool]], dtype: torch.dtype) -> None:
    """Alone or among writes, over and under them, in any type."""
    table, expected = StagedWriteTensor((3, 4), dtype, CPU), torch.zeros(3, 4, dtype=dtype)
    for value, (row, start, is_cell) in enumerate(cells, 1):
        if is_cell:
            table.stage_cells({(row, start): value})
            expected[row, start] = value
        else:
            table.stage_write(row, 0, [value] * (start + 1))
            expected[row, : start + 1] = value
    table.apply_write()
    assert torch.equal(table.gpu, expected)
    table.gpu.zero_()
    table.apply_write()
    assert not table.gpu.any()


def test_cells_are_packed_like_writes_of_one_value() -> None:
    for num_cells in range(1, 6):
        cells = {(row, 2 * row): 10 + row for row in range(num_cells)}
        packed = pack_cells(cells, UvaRing(CPU))
        writes = [RowWrite(*at, np.array([value], dtype=np.int32)) for at, value in cells.items()]
        expected = pack_writes(writes, UvaRing(CPU))
        assert (packed.num_writes, packed.longest) == (num_cells, 1)
        assert (packed.num_words, packed.first_content) == (expected.num_words, expected.first_content)
        assert packed.buffer.np[: 3 * num_cells].tolist() == expected.buffer.np[: 3 * num_cells].tolist()
        assert packed.contents(torch.int32).tolist() == expected.contents(torch.int32).tolist()


@pytest.mark.parametrize(("row", "start"), [(-1, 0), (3, 0), (0, -1), (0, 4)])
def test_a_cell_outside_of_the_tensor_is_refused(row: int, start: int) -> None:
    message = f"a write at row {row}, start {start}, length 1 leaves the tensor of shape (3, 4)"
    with pytest.raises(AssertionError, match=re.escape(message)):
        StagedWriteTensor((3, 4), torch.int32, CPU).stage_cells({(row, start): 1})


@given(writes=ragged_writes(max_length=40))
@settings(deadline=None)
def test_no_two_packed_writes_share_a_cell(writes: Writes) -> None:
    """The kernel's programs may run in any order."""
    for row in range(NUM_ROWS):
        of_row = [RowWrite(row, start, np.array(values, dtype=np.int32)) for _, start, values in writes if values]
        if not of_row:
            continue
        cells = [cell for write in without_overlaps(of_row) for cell in range(write.start, write.end)]
        assert len(cells) == len(set(cells))


def test_later_writes_win_over_earlier_ones() -> None:
    table = StagedWriteTensor((2, 8), torch.int32, CPU)
    table.stage_write(0, 0, [1, 1, 1, 1, 1])
    table.stage_write(1, 6, [9])
    table.stage_write(0, 3, [2, 2, 2])
    table.stage_write(0, 4, [3])
    table.stage_write(0, 7, [4])
    table.apply_write()
    assert table.gpu.tolist() == [[1, 1, 1, 2, 3, 2, 0, 4], [0, 0, 0, 0, 0, 0, 9, 0]]


def test_adjacent_writes_are_not_merged() -> None:
    """No cell is copied on the host unless writes overlap."""
    writes = [RowWrite(0, start, np.ones(length, dtype=np.int32)) for start, length in ((4, 4), (0, 4), (8, 1))]
    assert without_overlaps(writes) is writes


def test_a_long_write_is_split_around_a_later_one() -> None:
    writes = [RowWrite(3, start, np.full(length, start)) for start, length in ((10, 4), (20, 2), (11, 2))]
    (first, second) = without_overlaps(writes)
    assert (first.row, first.start, first.values.tolist()) == (3, 10, [10, 11, 11, 10])
    assert (second.row, second.start, second.values.tolist()) == (3, 20, [20, 20])


def test_elements_of_a_vector_and_of_a_table() -> None:
    vector = StagedWriteTensor((4,), torch.int64, CPU)
    vector.stage_write(2, 0, [5])
    vector.stage_write(2, 0, [-(2**62)])
    vector.stage_write(3, 0, [7])
    vector.apply_write()
    assert vector.gpu.tolist() == [0, 0, -(2**62), 7]
    table = StagedWriteTensor((2, 3), torch.float32, CPU)
    table.stage_write(1, 0, [0.1])
    table.apply_write()
    assert torch.equal(table.gpu, torch.tensor([[0.0] * 3, [0.1, 0, 0]]))


def test_floats_arrive_with_all_their_bits() -> None:
    values = np.array([np.nan, -0.0, np.inf, 1e-45, 3.4028235e38], dtype=np.float32)
    table = StagedWriteTensor((1, 5), torch.float32, CPU)
    table.stage_write(0, 0, values)
    table.apply_write()
    assert table.gpu.numpy().tobytes() == values.tobytes()


def test_values_are_copied_when_staged() -> None:
    values = np.array([1, 2, 3], dtype=np.int32)
    table = StagedWriteTensor((1, 3), torch.int32, CPU)
    table.stage_write(0, 0, values)
    values[:] = 9
    table.apply_write()
    assert table.gpu.tolist() == [[1, 2, 3]]


def test_the_tensor_stays_where_it_is_and_writes_are_applied_once() -> None:
    table = StagedWriteTensor((2, 2), torch.int32, CPU)
    address = table.gpu.data_ptr()
    table.stage_write(0, 0, [1, 2])
    table.apply_write()
    table.gpu.fill_(7)
    table.apply_write()
    assert table.gpu.tolist() == [[7, 7], [7, 7]]
    assert table.gpu.data_ptr() == address


def test_one_buffer_for_all_writes_and_none_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def counted(writes: Sequence[RowWrite], ring: UvaRing) -> PackedWrites:
        sent.append(len(writes))
        return pack_writes(writes, ring)

    monkeypatch.setattr(staged_write, "pack_writes", counted)
    table = StagedWriteTensor((3, 4), torch.int32, CPU)
    table.apply_write()
    table.stage_write(0, 4, [])
    table.apply_write()
    assert sent == []
    for row in range(3):
        table.stage_write(row, row, [row])
    table.apply_write()
    assert sent == [3]


def test_cleared_writes_are_not_applied() -> None:
    table = StagedWriteTensor((1, 2), torch.int32, CPU)
    table.stage_write(0, 0, [1, 2])
    table.clear_staged()
    table.apply_write()
    assert table.gpu.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("row", "start", "length"), [(-1, 0, 1), (3, 0, 1), (0, -1, 1), (0, 0, 5), (2, 4, 1), (1, 5, 0)]
)
def test_a_write_that_leaves_the_tensor_is_refused(row: int, start: int, length: int) -> None:
    table = StagedWriteTensor((3, 4), torch.int32, CPU)
    message = f"a write at row {row}, start {start}, length {length} leaves the tensor of shape (3, 4)"
    with pytest.raises(AssertionError, match=re.escape(message)):
        table.stage_write(row, start, [1] * length)


def test_a_vector_has_one_cell_a_row() -> None:
    with pytest.raises(AssertionError, match=re.escape("row 0, start 0, length 2 leaves the tensor of shape (3,)")):
        StagedWriteTensor((3,), torch.int32, CPU).stage_write(0, 0, [1, 2])


@pytest.mark.parametrize(
    ("dtype", "values", "message"),
    [
        (torch.int32, np.array([1, 2**31]), "hold 2147483648, which int32 cannot hold"),
        (torch.int64, np.array([2**63], dtype=np.uint64), "hold 9223372036854775808, which int64 cannot hold"),
        (torch.int32, np.array([1.0]), "are float64; int32 cannot hold them"),
        (torch.float32, np.array(["a"]), "are <U1; float32 cannot hold them"),
        (torch.int32, [[1]], "have shape (1, 1); give one dimension"),
    ],
)
def test_values_that_would_change_are_refused(dtype: torch.dtype, values: Any, message: str) -> None:
    table = StagedWriteTensor((1, 4), dtype, CPU)
    with pytest.raises(AssertionError, match=re.escape(message)):
        table.stage_write(0, 0, values)


def test_a_number_in_a_list_that_is_too_large_is_refused() -> None:
    table = StagedWriteTensor((1, 4), torch.int32, CPU)
    with pytest.raises(OverflowError, match="2147483648"):
        table.stage_write(0, 0, [1, 2**31])


def test_unsupported_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(AssertionError, match=re.escape("torch.float16 cannot be written in stages")):
        StagedWriteTensor((1, 4), torch.float16, CPU)
    with pytest.raises(AssertionError, match=re.escape("has 3 dimensions")):
        StagedWriteTensor((1, 4, 4), torch.int32, CPU)  # type: ignore[arg-type]  # that is the point


@given(writes=ragged_writes(), dtype=st.sampled_from([*NUMPY_DTYPES]))
@settings(deadline=None, max_examples=25, database=None)
def check_kernel(writes: Writes, dtype: torch.dtype) -> None:
    """Kernel and reference, given the same packed writes, leave the same tensor."""
    from piecegraph.runner.device_memory.kernels.staged_write import apply_writes_on_gpu

    by_row = [
        [RowWrite(row, start, np.array(values, dtype=NUMPY_DTYPES[dtype])) for at, start, values in writes if at == row]
        for row in range(NUM_ROWS)
    ]
    filled = [[write for write in of_row if len(write.values)] for of_row in by_row]
    unique = [write for of_row in filled if of_row for write in without_overlaps(of_row)]
    if not unique:
        return
    packed = pack_writes(unique, UvaRing(CPU))
    expected, found = (torch.full((NUM_ROWS, WIDTH), 77, dtype=dtype) for _ in range(2))
    apply_writes_reference(expected, packed)
    apply_writes_on_gpu(found, packed)
    assert torch.equal(found, expected)


def check_kernel_on_a_vector_and_a_long_write() -> None:
    """A vector's rows are a cell apart; a write of more blocks than it gets programs is written to its end."""
    from piecegraph.runner.device_memory.kernels.staged_write import BLOCK, MAX_PROGRAMS_PER_WRITE, apply_writes_on_gpu

    vector = torch.zeros(4, dtype=torch.int64)
    apply_writes_on_gpu(
        vector, pack_writes([RowWrite(3, 0, np.array([2**40])), RowWrite(1, 0, np.array([-1]))], UvaRing(CPU))
    )
    assert vector.tolist() == [0, -1, 0, 2**40]
    length = BLOCK * (MAX_PROGRAMS_PER_WRITE + 1) + 5
    table = torch.zeros(2, length + 2, dtype=torch.int32)
    apply_writes_on_gpu(table, pack_writes([RowWrite(1, 1, np.arange(1, length + 1, dtype=np.int32))], UvaRing(CPU)))
    assert table[0].count_nonzero() == 0
    assert table[1].tolist() == [0, *range(1, length + 1), 0]


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_kernel)


def test_the_kernel_writes_vectors_and_long_writes() -> None:
    interpreted(check_kernel_on_a_vector_and_a_long_write)


def test_a_call_names_all_of_the_kernels_arguments_in_order() -> None:
    """A prepared launch relies on the order, and no argument that a launch changes is specialised."""
    from piecegraph.runner.device_memory.kernels.staged_write import apply_writes_call

    call = apply_writes_call(torch.zeros(2, 4, dtype=torch.int32), pack_cells({(0, 1): 7, (1, 2): 8}, UvaRing(CPU)))
    assert list(call.arguments) == [param.name for param in call.kernel.params]
    assert call.grid == (2, 1, 1)
    free = {param.name for param in call.kernel.params if param.do_not_specialize}
    unaligned = {param.name for param in call.kernel.params if param.do_not_specialize_on_alignment}
    assert "num_writes" in free and {"words", "contents"} <= unaligned


@pytest.mark.gpu
@given(writes=ragged_writes(), dtype=st.sampled_from([*NUMPY_DTYPES]))
@settings(deadline=None)
def test_staged_writes_equal_plain_assignments_on_the_gpu(writes: Writes, dtype: torch.dtype) -> None:
    table = StagedWriteTensor((NUM_ROWS, WIDTH), dtype, torch.device("cuda"))
    for i, (row, start, values) in enumerate(writes):
        table.stage_write(row, start, values)
        if i == 7:
            table.apply_write()
    table.apply_write()
    assert torch.equal(table.gpu.cpu(), assigned(writes, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_applies_are_asynchronous_on_the_gpu(dtype: torch.dtype) -> None:
    """Many steps' writes are in flight at once, while the device is busy; each step's copy keeps its values."""
    num_steps = 40
    table = StagedWriteTensor((num_steps, 3000), dtype, torch.device("cuda"))
    seen = torch.zeros(num_steps, 3000, dtype=dtype, device="cuda")
    table.stage_write(0, 0, [0])
    table.apply_write()  # compiles
    torch.cuda.synchronize()
    with no_sync():
        torch.cuda._sleep(200_000_000)
        for step in range(num_steps):
            table.stage_write(0, 0, np.full(3000, step, dtype=np.int64))  # the row every step writes
            table.stage_write(step, step, [-step] * 5)
            table.apply_write()
            seen[step].copy_(table.gpu[0], non_blocking=True)
    expected = torch.arange(num_steps).to(dtype)[:, None].expand(-1, 3000).clone()
    assert torch.equal(seen.cpu(), expected)
    found = table.gpu.cpu()
    for step in range(1, num_steps):
        assert found[step, step : step + 5].tolist() == [-step] * 5
        assert found[step].count_nonzero() == 5
