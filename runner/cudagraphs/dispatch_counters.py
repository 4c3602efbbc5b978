"""Counters of the modes, padded sizes and downgrade reasons of batches, for `explain` and for monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import GraphNotCaptured
from piecegraph.runner.cudagraphs.dispatcher import Dispatched


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRow:
    """The batches that ran under the same mode with the same padded size, for the same reason."""

    mode: CUDAGraphMode
    num_tokens: int  # padded
    reason: str | None  # for a downgrade
    batches: int
    real_tokens: int  # of all batches, without padding

    @property
    def padded_tokens(self) -> int:
        """The number of tokens of all batches, with padding."""
        return self.batches * self.num_tokens


class DispatchCounters:
    """The mutable counters of one runner."""

    def __init__(self) -> None:
        # steps by mode, padded size, reason, whether the batch is a decode, and its size without padding
        self._counts: dict[tuple[CUDAGraphMode, int, str | None, bool, int], int] = {}

    def record(self, dispatched: Dispatched, num_tokens: int, *, is_decode: bool = False) -> None:
        """Count a batch of `num_tokens` tokens before padding. `is_decode`: each request has one token."""
        key = dispatched.mode, dispatched.descriptor.num_tokens, dispatched.reason, is_decode, num_tokens
        self._counts[key] = self._counts.get(key, 0) + 1

    def rows(self) -> list[DispatchRow]:
        """Return all counters, most frequent first."""
        sums: dict[tuple[CUDAGraphMode, int, str | None], tuple[int, int]] = {}
        for (mode, padded, reason, _, num_tokens), count in self._counts.items():
            batches, tokens = sums.get((mode, padded, reason), (0, 0))
            sums[mode, padded, reason] = batches + count, tokens + count * num_tokens
        rows = [
            DispatchRow(mode=mode, num_tokens=num_tokens, reason=reason, batches=batches, real_tokens=real_tokens)
            for (mode, num_tokens, reason), (batches, real_tokens) in sums.items()
        ]
        return sorted(rows, key=lambda row: -row.batches)

    def shapes(self, *, is_decode: bool) -> dict[int, int]:
        """Return the number of batches by tokens before padding, of decode batches or of all others."""
        shapes: dict[int, int] = {}
        for (_, _, _, decodes, num_tokens), count in self._counts.items():
            if decodes is is_decode:
                shapes[num_tokens] = shapes.get(num_tokens, 0) + count
        return shapes

    def by_mode(self) -> dict[CUDAGraphMode, int]:
        """Return the number of batches by mode."""
        counts: dict[CUDAGraphMode, int] = {}
        for (mode, *_), batches in self._counts.items():
            counts[mode] = counts.get(mode, 0) + batches
        return counts


def refuse_downgrade(dispatched: Dispatched, strict: bool) -> None:
    """Raise `GraphNotCaptured` if `strict` and the batch is downgraded, unless the lower mode is cheaper."""
    if strict and dispatched.reason is not None and not dispatched.is_cheaper:
        raise GraphNotCaptured(
            f"strict=True, and a batch of {dispatched.descriptor.num_tokens} tokens would run "
            f"{dispatched.mode.value}: {dispatched.reason}. Capture a size that holds it, or leave strict out."
        )
