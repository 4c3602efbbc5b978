"""A device tensor whose rows the host writes in ragged segments, all segments of a step with one kernel launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from piecegraph.runner.device_memory.host_memory.packed_writes import WORD_BYTES, PackedWrites
from piecegraph.runner.device_memory.host_memory.uva import UvaRing

if TYPE_CHECKING:
    from piecegraph.runner.device_memory.kernels.staged_write import PreparedWriter

Array = npt.NDArray[Any]

NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
}
"""The dtypes that a `StagedWriteTensor` may have, with numpy's."""

CONTENTS_ALIGNMENT = 4
"""The alignment of contents in words: 16 bytes, on which Triton specialises pointers, so that only one variant of the
kernel is compiled."""


class StagedWriteTensor:
    """A zeroed tensor on `device`, `gpu` `[rows, width]` or `[rows]`, with writes that are staged on the host.

    `gpu` never moves, so captured graphs may read it; the attribute has this name on a CPU device, too. Writes are
    collected by `stage_write` and reach the device in `apply_write`, in the order of the current stream: work launched
    before reads the old values, work launched after reads the new ones, and the host waits for neither. The kernel
    reads the values from host memory (`UvaRing`), so `apply_write` is one launch. The class follows Model Runner V2's
    class of the same name, with one buffer instead of four; of writes to the same cell the last one wins.

    Args:
        shape: `(rows, width)` or `(rows,)`; the latter is written like `(rows, 1)`.
        dtype: int32, int64 or float32.
        device: the device of `gpu`; the kernel runs on a CUDA device, its torch reference elsewhere.
    """

    def __init__(self, shape: tuple[int, int] | tuple[int], dtype: torch.dtype, device: torch.device) -> None:
        assert dtype in NUMPY_DTYPES, f"{dtype} cannot be written in stages; use one of {[*map(str, NUMPY_DTYPES)]}"
        assert len(shape) in (1, 2), f"shape {shape} has {len(shape)} dimensions; give (rows, width) or (rows,)"
        self.gpu = torch.zeros(shape, dtype=dtype, device=device)
        self._dtype = NUMPY_DTYPES[dtype]
        self._num_rows = shape[0]
        self._width = shape[1] if len(shape) == 2 else 1
        self._staged: dict[int, list[RowWrite]] = {}  # by row, in the order of staging
        self._ring = UvaRing(device)
        self._writer: PreparedWriter | None = None  # made by the first `apply_write` on a GPU
        self._cells: dict[tuple[int, int], int] = {}  # (row, start) -> value; applied before `_staged`

    def stage_write(self, row: int, start: int, values: Sequence[int] | Sequence[float] | Array) -> None:
        """Stage `values` for `gpu[row, start:]`, to be written by the next `apply_write`; later writes win.

        `values` are copied now. An array of another dtype is converted if nothing but the precision of a float is
        lost, and else raises AssertionError. A list is converted by numpy's rules: an integer that is too large raises
        OverflowError, a float for an integer is truncated. A write that leaves the tensor raises AssertionError.
        """
        if isinstance(values, np.ndarray):
            cells = _converted(values, self._dtype)
        else:  # usually one or two numbers, so numpy is called once only
            cells = np.array(values, dtype=self._dtype)
        assert cells.ndim == 1, f"values to stage have shape {cells.shape}; give one dimension"
        length = len(cells)
        assert 0 <= row < self._num_rows and start >= 0 and start + length <= self._width, (
            f"a write at row {row}, start {start}, length {length} leaves the tensor of shape {tuple(self.gpu.shape)}"
        )
        if length:
            self._staged.setdefault(row, []).append(RowWrite(row, start, cells))

    def stage_cells(self, values: Mapping[tuple[int, int], int]) -> None:
        """Do `stage_write(row, start, [value])` for each of `values`, by (row, start).

        For an int32 tensor this costs a fraction of `stage_write`, which matters because decode steps write little
        else. A value that int32 cannot hold makes `apply_write` raise OverflowError.
        """
        if self._staged or self._dtype != np.int32:
            for (row, start), value in values.items():
                self.stage_write(row, start, [value])
            return
        for row, start in values:
            assert 0 <= row < self._num_rows and 0 <= start < self._width, (
                f"a write at row {row}, start {start}, length 1 leaves the tensor of shape {tuple(self.gpu.shape)}"
            )
        self._cells.update(values)

    def clear_staged(self) -> None:
        """Discard all staged writes."""
        self._staged.clear()
        self._cells.clear()

    def apply_write(self) -> None:
        """Apply all staged writes with one kernel; without staged writes, do nothing.

        Mutates `gpu`. Must not be captured in a graph, because a replay would repeat the same writes.
        """
        if self._staged:
            self._cells_to_writes()
            writes = [write for of_row in self._staged.values() for write in without_overlaps(of_row)]
            packed = pack_writes(writes, self._ring)
        elif self._cells:
            packed = pack_cells(self._cells, self._ring)
        else:
            return
        if self.gpu.device.type == "cuda":
            if self._writer is None:
                from piecegraph.runner.device_memory.kernels.staged_write import PreparedWriter

                self._writer = PreparedWriter(self.gpu)
            self._writer.write(packed)
            packed.buffer.read_until_here()
        else:
            apply_writes_reference(self.gpu, packed)
        self.clear_staged()

    def _cells_to_writes(self) -> None:
        for (row, start), value in self._cells.items():
            self._staged.setdefault(row, []).insert(0, RowWrite(row, start, np.array([value], dtype=self._dtype)))


class RowWrite(NamedTuple):  # a step makes hundreds; a frozen dataclass takes twice as long
    """A write of `values` `[length]`, at least one, to the cells of a row from `start` on."""

    row: int
    start: int
    values: Array

    @property
    def end(self) -> int:
        """The index after the last written cell."""
        return self.start + len(self.values)


def without_overlaps(writes: list[RowWrite]) -> list[RowWrite]:
    """Return equivalent writes to one row in which each cell is written once, by the last of `writes` to write it.

    A kernel's programs run in any order, so overlapping writes would race. Writes without overlaps, the usual case,
    are returned unchanged.
    """
    if len(writes) == 1:
        return writes
    in_place = sorted(writes, key=lambda write: write.start)
    if all(left.end <= right.start for left, right in pairwise(in_place)):
        return writes
    low = in_place[0].start
    high = max(write.end for write in writes)
    values = np.empty(high - low, dtype=writes[0].values.dtype)
    is_written = np.zeros(high - low, dtype=np.bool_)
    for write in writes:
        values[write.start - low : write.end - low] = write.values
        is_written[write.start - low : write.end - low] = True
    edges = np.flatnonzero(np.diff(is_written, prepend=False, append=False))
    return [RowWrite(writes[0].row, low + first, values[first:end]) for first, end in edges.reshape(-1, 2).tolist()]


def pack_writes(writes: Sequence[RowWrite], ring: UvaRing) -> PackedWrites:
    """Pack `writes`, at least one and all of the same dtype, into a buffer of `ring`."""
    num_writes = len(writes)
    lengths = [len(write.values) for write in writes]
    first_content = -(-3 * num_writes // CONTENTS_ALIGNMENT) * CONTENTS_ALIGNMENT
    dtype = writes[0].values.dtype
    num_words = first_content + sum(lengths) * (dtype.itemsize // WORD_BYTES)
    buffer = ring.take(num_words)
    filled = buffer.np[:num_words]
    filled[:num_writes] = [write.row for write in writes]
    filled[num_writes : 2 * num_writes] = [write.start for write in writes]
    np.cumsum(lengths, dtype=np.int32, out=filled[2 * num_writes : 3 * num_writes])
    np.concatenate([write.values for write in writes], out=filled[first_content:].view(dtype))
    return PackedWrites(buffer, num_writes, num_words, max(lengths), first_content)


def pack_cells(cells: Mapping[tuple[int, int], int], ring: UvaRing) -> PackedWrites:
    """Pack writes of one int32 each, at least one, given by (row, start), as `pack_writes` does."""
    num_writes = len(cells)
    rows, starts = zip(*cells, strict=True)
    padding = (0,) * (-3 * num_writes % CONTENTS_ALIGNMENT)
    values = [*rows, *starts, *range(1, num_writes + 1), *padding, *cells.values()]
    buffer = ring.take(len(values))
    buffer.np[: len(values)] = values
    return PackedWrites(buffer, num_writes, len(values), 1, 3 * num_writes + len(padding))


def apply_writes_reference(tensor: torch.Tensor, packed: PackedWrites) -> None:
    """Write `packed` into `tensor`, `[rows, width]` or `[rows]`: the torch reference of the kernel."""
    rows, starts, ends = packed.buffer.gpu[: 3 * packed.num_writes].view(3, -1).long()
    firsts = torch.cat([ends.new_zeros(1), ends[:-1]])
    write = torch.repeat_interleave(ends - firsts)  # [num_cells], the write a cell belongs to
    column = starts[write] + torch.arange(len(write), device=tensor.device) - firsts[write]
    tensor.view(len(tensor), -1)[rows[write], column] = packed.contents(tensor.dtype)


def _converted(found: Array, dtype: np.dtype[Any]) -> Array:
    """Return a copy of `found` as `dtype`. Raises AssertionError if values would be lost."""
    assert np.can_cast(found.dtype, dtype, "same_kind"), f"values to stage are {found.dtype}; {dtype} cannot hold them"
    converted = found.astype(dtype)
    if dtype.kind == "i" and not np.can_cast(found.dtype, dtype, "safe"):
        is_lost = converted != found
        assert not is_lost.any(), f"values to stage hold {found[is_lost][0]}, which {dtype} cannot hold"
    return converted
