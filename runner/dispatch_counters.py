"""How batches ran: counted by mode, padded size and reason, for `explain` and whoever watches a server."""

from __future__ import annotations

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
        self._counts: dict[tuple[CUDAGraphMode, int, str | None], list[int]] = {}  # batches, their tokens

    def record(self, dispatched: Dispatched, num_tokens: int) -> None:
        """Count a batch of `num_tokens` tokens before padding."""
        counts = self._counts.setdefault((dispatched.mode, dispatched.descriptor.num_tokens, dispatched.reason), [0, 0])
        counts[0] += 1
        counts[1] += num_tokens

    def rows(self) -> list[DispatchRow]:
        """Most frequent first."""
        rows = [
            DispatchRow(mode=mode, num_tokens=num_tokens, reason=reason, batches=batches, real_tokens=real_tokens)
            for (mode, num_tokens, reason), (batches, real_tokens) in self._counts.items()
        ]
        return sorted(rows, key=lambda row: -row.batches)

    def by_mode(self) -> dict[CUDAGraphMode, int]:
        """Batches by mode."""
        counts: dict[CUDAGraphMode, int] = {}
        for (mode, _, _), (batches, _) in self._counts.items():
            counts[mode] = counts.get(mode, 0) + batches
        return counts


def refuse_downgrade(dispatched: Dispatched, strict: bool) -> None:
    """Raise `GraphNotCaptured` for a downgraded batch if `strict`."""
    if strict and dispatched.reason is not None:
        raise GraphNotCaptured(
            f"strict=True, and a batch of {dispatched.descriptor.num_tokens} tokens would run "
            f"{dispatched.mode.value}: {dispatched.reason}. Capture a size that holds it, or leave strict out."
        )
