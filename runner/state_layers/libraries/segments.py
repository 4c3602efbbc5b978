"""Batches of segments that a library computes in one call, since none begins with a state that another leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from piecegraph.runner.device_memory.host_memory.host_copy import to_device

CHUNK_SIZE = 64
"""The tokens of a chunk, in flash-linear-attention."""


class Segment(NamedTuple):
    """Some rows of a step that belong to one text."""

    start: int  # row
    end: int
    read: int  # the block of the state before them; negative: there is none
    write: int  # the block for the state after them; negative: it is kept nowhere


def independent(segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments in batches that run one after the other as if the segments did, in their order.

    A segment comes after those that leave the state with which it begins, and after those that read or write what it
    overwrites. A batch reads all its states before it writes any.
    """
    batches: list[list[Segment]] = []
    last_read: dict[int, int] = {}  # by block, the batch
    last_write: dict[int, int] = {}
    for segment in segments:
        number = 0
        if segment.read >= 0:
            number = last_write.get(segment.read, -1) + 1
        if segment.write >= 0:
            number = max(number, last_read.get(segment.write, 0), last_write.get(segment.write, -1) + 1)
            last_write[segment.write] = number
        if segment.read >= 0:
            last_read[segment.read] = max(number, last_read.get(segment.read, 0))
        if number == len(batches):
            batches.append([])
        batches[number].append(segment)
    return tuple([tuple(batch) for batch in batches])


MOST_PADDING = 2
"""How many times its rows a batch may have with its padding, for whose memory nothing is set aside; beyond that, its
segments are computed one after another."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The rows of a batch of segments, and where each begins among them."""

    ranges: tuple[tuple[int, int], ...]  # of rows of the step
    rows: torch.Tensor  # [num_rows] int64, those of the step
    cu_seqlens: torch.Tensor  # [num_segments + 1] int64
    chunk_indices: torch.Tensor  # [num_chunks, 2] int64: each chunk's segment, and its number there
    padded: (
        torch.Tensor | None
    )  # [num_segments, longest] int64, indices into `rows`; None: one segment, or too much padding
    is_row: torch.Tensor | None  # [num_segments, longest] bool; where False, `padded` repeats the segment's last row
    unpadded: torch.Tensor | None  # [num_rows] int64, where each row is in `padded`, flattened

    @property
    def span(self) -> slice | None:
        """Return the rows as a slice of the step's, if they follow one another."""
        is_one = all(end == start for (_, end), (start, _) in pairwise(self.ranges))
        return slice(self.ranges[0][0], self.ranges[-1][1]) if is_one else None

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of a tensor `[num_tokens, ...]`: a view if they follow one another."""
        span = self.span
        return x[self.rows] if span is None else x[span]

    def write(self, out: torch.Tensor, result: torch.Tensor) -> None:
        """Write `[num_rows, ...]` to the rows of `out`, `[num_tokens, ...]`."""
        span = self.span
        out[self.rows if span is None else span] = result


def ragged_rows(segments: Sequence[Segment], device: torch.device) -> RaggedRows:
    """Return the rows of a batch on `device`, without waiting for it. A step has thousands: numpy plans them."""
    firsts = np.array([segment.start for segment in segments])
    lens = np.array([segment.end for segment in segments]) - firsts
    starts = np.concatenate([[0], lens.cumsum()])
    num_rows, longest = int(starts[-1]), int(lens.max())

    def on_device(values: npt.NDArray[np.int64]) -> torch.Tensor:
        return to_device(values, torch.int64, device)

    def numbered(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the segment of each of its `counts` parts, and the number of the part there."""
        segment = np.arange(len(segments)).repeat(counts)
        return segment, np.arange(len(segment)) - (counts.cumsum() - counts)[segment]

    segment, at = numbered(lens)
    is_padded = len(segments) > 1 and len(segments) * longest <= MOST_PADDING * num_rows
    places = np.arange(longest)
    return RaggedRows(
        ranges=tuple([(segment.start, segment.end) for segment in segments]),
        rows=on_device(firsts[segment] + at),
        cu_seqlens=on_device(starts),
        chunk_indices=on_device(np.stack(numbered(-(-lens // CHUNK_SIZE)), axis=1)),
        padded=on_device(np.minimum(starts[:-1, None] + places, starts[1:, None] - 1)) if is_padded else None,
        is_row=to_device(places < lens[:, None], torch.bool, device) if is_padded else None,
        unpadded=on_device(segment * longest + at) if is_padded else None,
    )
