"""A tensor on the device whose rows the host writes in ragged pieces, all of a step's with one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from piecegraph.runner.uva_ring import UvaBuffer, UvaRing

if TYPE_CHECKING:
    from piecegraph.runner.kernels.staged_write import PreparedWriter

Array = npt.NDArray[Any]

NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
}
"""The types a StagedWriteTensor may have."""

WORD_BYTES = 4
CONTENTS_ALIGNMENT = 4
"""In words: 16 bytes, what Triton specialises pointers on, so that a kernel is compiled for one case."""


class StagedWriteTensor:
    """`gpu`, a zeroed tensor `[rows, width]` or `[rows]` on `device`, and writes to it that wait on the host.

    `gpu` never moves, so captured graphs may read it; it has this name on a CPU device too. Writes are
    collected by `stage_write` and reach the device in `apply_write`, in the order of the current stream:
    whatever was launched before reads the old values, whatever comes after the new ones, and the host
    waits for neither. The kernel reads what is written where the host has put it (`UvaRing`), so an apply is
    one launch. After Model Runner V2's class of this name; ours has one buffer instead of four, and of writes
    to the same cell the last one wins.

    Args:
        shape: `(rows, width)` or `(rows,)`; the latter is written like `(rows, 1)`.
        dtype: int32, int64 or float32.
        device: where `gpu` lies; the kernel runs on a CUDA device, its torch reference elsewhere.
    """

    def __init__(self, shape: tuple[int, int] | tuple[int], dtype: torch.dtype, device: torch.device) -> None:
        assert dtype in NUMPY_DTYPES, f"{dtype} cannot be written in stages; use one of {[*map(str, NUMPY_DTYPES)]}"
        assert len(shape) in (1, 2), f"shape {shape} has {len(shape)} dimensions; give (rows, width) or (rows,)"
        self.gpu = torch.zeros(shape, dtype=dtype, device=device)
        self._dtype = NUMPY_DTYPES[dtype]
        self._num_rows = shape[0]
        self._width = shape[1] if len(shape) == 2 else 1
        self._staged: dict[int, list[RowWrite]] = {}  # by row, in the order they came
        self._ring = UvaRing(device)
        self._writer: PreparedWriter | None = None  # on a GPU, from the first apply on
        self._cells: dict[tuple[int, int], int] = {}  # (row, start) -> value; of a row in both these come first

    def stage_write(self, row: int, start: int, values: Sequence[int] | Sequence[float] | Array) -> None:
        """Have the next `apply_write` put `values` at `gpu[row, start:]`; later ones go over earlier ones.

        `values` are copied now. An array of another type is converted if that loses no more than a
        float's rounding, or else is an AssertionError. A list is converted by numpy's rules: an integer
        too large is an OverflowError, a float for an integer is cut. A write that leaves the tensor is
        an AssertionError.
        """
        if isinstance(values, np.ndarray):
            cells = _converted(values, self._dtype)
        else:  # often a number or two, so one call of numpy has to do
            cells = np.array(values, dtype=self._dtype)
        assert cells.ndim == 1, f"values to stage have shape {cells.shape}; give one dimension"
        length = len(cells)
        assert 0 <= row < self._num_rows and start >= 0 and start + length <= self._width, (
            f"a write at row {row}, start {start}, length {length} leaves the tensor of shape {tuple(self.gpu.shape)}"
        )
        if length:
            self._staged.setdefault(row, []).append(RowWrite(row, start, cells))

    def stage_write_elem(self, row: int, value: float) -> None:
        """Have the next `apply_write` put `value` at the beginning of a row: all there is of one in `[rows]`."""
        self.stage_write(row, 0, [value])

    def stage_cells(self, values: Mapping[tuple[int, int], int]) -> None:
        """`stage_write(row, start, [value])` for each of `values` by (row, start), of an int32 tensor, at a fraction
        of the cost: a step of decodes writes little else. A value that int32 cannot hold is an OverflowError of
        `apply_write`."""
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
        """Forget what is staged."""
        self._staged.clear()
        self._cells.clear()

    def apply_write(self) -> None:
        """Write what is staged, with one kernel; with nothing staged, do nothing.

        Mutates `gpu`. Not for use in a captured graph: a replay would repeat these very writes.
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
                from piecegraph.runner.kernels.staged_write import PreparedWriter

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
    """`values` `[length]`, at least one, for the cells of a row from `start` on."""

    row: int
    start: int
    values: Array

    @property
    def end(self) -> int:
        return self.start + len(self.values)


@dataclass(frozen=True, slots=True)
class PackedWrites:
    """Writes that share no cell, in one buffer."""

    buffer: UvaBuffer
    """`num_writes` rows, as many starts, as many ends of contents (cumulative), contents at `first_content`."""
    num_writes: int
    num_words: int
    longest: int  # cells of the longest write
    first_content: int  # a word, aligned as CONTENTS_ALIGNMENT says

    def contents(self, dtype: torch.dtype) -> torch.Tensor:
        """What is written, `[ends[-1]]` of the type it was packed from."""
        return self.buffer.gpu[self.first_content : self.num_words].view(dtype)


def without_overlaps(writes: list[RowWrite]) -> list[RowWrite]:
    """Writes of one row, such that each cell is written once and by the last of `writes` that writes it.

    A kernel's programs run in any order, so overlapping writes would race. Writes that share no cell,
    nearly always, are returned as they are.
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
    """`writes`, at least one and all of one type, in a buffer of the ring's."""
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
    """`pack_writes` of writes of one int32 each, at least one, by (row, start)."""
    num_writes = len(cells)
    rows, starts = zip(*cells, strict=True)
    padding = (0,) * (-3 * num_writes % CONTENTS_ALIGNMENT)
    values = [*rows, *starts, *range(1, num_writes + 1), *padding, *cells.values()]
    buffer = ring.take(len(values))
    buffer.np[: len(values)] = values
    return PackedWrites(buffer, num_writes, len(values), 1, 3 * num_writes + len(padding))


def apply_writes_reference(tensor: torch.Tensor, packed: PackedWrites) -> None:
    """Write `packed` into `tensor`, `[rows, width]` or `[rows]`: what the kernel does, in torch."""
    rows, starts, ends = packed.buffer.gpu[: 3 * packed.num_writes].view(3, -1).long()
    firsts = torch.cat([ends.new_zeros(1), ends[:-1]])
    write = torch.repeat_interleave(ends - firsts)  # [num_cells], the write a cell belongs to
    column = starts[write] + torch.arange(len(write), device=tensor.device) - firsts[write]
    tensor.view(len(tensor), -1)[rows[write], column] = packed.contents(tensor.dtype)


def _converted(found: Array, dtype: np.dtype[Any]) -> Array:
    """A copy of `found` as `dtype`."""
    assert np.can_cast(found.dtype, dtype, "same_kind"), f"values to stage are {found.dtype}; {dtype} cannot hold them"
    converted = found.astype(dtype)
    if dtype.kind == "i" and not np.can_cast(found.dtype, dtype, "safe"):
        is_lost = converted != found
        assert not is_lost.any(), f"values to stage hold {found[is_lost][0]}, which {dtype} cannot hold"
    return converted
