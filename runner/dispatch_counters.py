"""How batches ran: counted by mode, padded size and reason, for `explain` and whoever watches a server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import GraphNotCaptured
from piecegraph.runner.dispatcher import Dispatched


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRow:
    """Batches that ran alike."""

    mode: CUDAGraphMode
    num_tokens: int  # padded
    reason: str | None  # for a downgrade
    batches: int
    real_tokens: int  # of all of them, without padding

    @property
    def padded_tokens(self) -> int:
        return self.batches * self.num_tokens


class DispatchCounters:
    """Mutable; one a runner."""

    def __init__(self) -> None:
        self._batches: Counter[tuple[CUDAGraphMode, int, str | None]] = Counter()
        self._tokens: Counter[tuple[CUDAGraphMode, int, str | None]] = Counter()

    def record(self, dispatched: Dispatched, num_tokens: int) -> None:
        """Count a batch of `num_tokens` tokens before padding."""
        key = (dispatched.mode, dispatched.descriptor.num_tokens, dispatched.reason)
        self._batches[key] += 1
        self._tokens[key] += num_tokens

    def rows(self) -> list[DispatchRow]:
        """Most frequent first."""
        return [
            DispatchRow(mode=key[0], num_tokens=key[1], reason=key[2], batches=count, real_tokens=self._tokens[key])
            for key, count in self._batches.most_common()
        ]

    def by_mode(self) -> dict[CUDAGraphMode, int]:
        """Batches by mode."""
        counts: dict[CUDAGraphMode, int] = {}
        for (mode, _, _), count in self._batches.items():
            counts[mode] = counts.get(mode, 0) + count
        return counts


def refuse_downgrade(dispatched: Dispatched, strict: bool) -> None:
    """Raise `GraphNotCaptured` for a downgraded batch if `strict`."""
    if strict and dispatched.reason is not None:
        raise GraphNotCaptured(
            f"strict=True, and a batch of {dispatched.descriptor.num_tokens} tokens would run "
            f"{dispatched.mode.value}: {dispatched.reason}. Capture a size that holds it, or leave strict out."
        )
