"""Layers that share one block table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that keep the same tokens, hence share one block table for each request.

    All groups take blocks from one pool; a block of one group holds `block_size` tokens of all layers of
    that group. With a window, the token at position p attends to p - sliding_window + 1 .. p only.
    """

    layers: tuple[int, ...] = ()
    sliding_window: int | None = None  # tokens, 1 or more, the token itself included; None: full attention

    def __post_init__(self) -> None:
        window = self.sliding_window
        assert window is None or window >= 1, f"sliding_window={window}; it must be 1 or more, or None (full attention)"

    def num_passed_blocks(self, num_computed_tokens: int, block_size: int) -> int:
        """Return the number of leading blocks to which no token from position `num_computed_tokens` on attends."""
        if self.sliding_window is None:
            return 0
        return max(0, num_computed_tokens - self.sliding_window + 1) // block_size

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at any one time.

        `max_step_tokens`: the most tokens of the request that a step computes.
        """
        all_blocks = blocks_for(num_tokens, block_size)
        if self.sliding_window is None:
            return all_blocks
        # A step of n tokens reads and writes sliding_window - 1 + n positions, which may start inside a block.
        span = self.sliding_window - 1 + max_step_tokens
        return min(all_blocks, (span + block_size - 2) // block_size + 1)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)
