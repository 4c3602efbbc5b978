"""Layers that share one block table."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CacheKind(enum.Enum):
    """What a layer keeps of the tokens it has computed."""

    FULL = "full"  # every token
    SLIDING = "sliding"  # the tokens of a window
    CHUNKED = "chunked"  # the tokens of the current chunk
    LATENT = "latent"  # every token, as one compressed vector for all heads
    STATE = "state"  # a state of fixed size, whatever the number of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that keep the same tokens, hence share one block table for each request.

    All groups take blocks from one pool; a block of one group holds `block_size` tokens of all layers of
    that group. With a window, the token at position p attends to p - sliding_window + 1 .. p only; with chunks, to
    the tokens of its own chunk up to itself.

    A block of a group of states holds the layers' states after the last token of those `block_size` tokens that is
    computed. A step reads the block of the last token before it, and writes those of its own tokens; no other block is
    needed. With `keeps_boundaries` each has a block of its own, so that the states at all block boundaries can be
    found by later requests. Without, a request has one block, its slot, which all entries of its table name.
    """

    layers: tuple[int, ...] = ()
    sliding_window: int | None = None  # tokens, 1 or more, the token itself included; None: no window
    chunk_size: int | None = None  # tokens of a chunk; None: no chunks
    is_state: bool = False
    is_latent: bool = False  # every token is kept, as one vector for all heads
    keeps_boundaries: bool = True  # of states

    def __post_init__(self) -> None:
        window, chunk = self.sliding_window, self.chunk_size
        assert window is None or window >= 1, f"sliding_window={window}; it must be 1 or more, or None (full attention)"
        assert chunk is None or chunk >= 1, f"chunk_size={chunk}; it must be 1 or more, or None (no chunks)"
        kinds = (window is not None, chunk is not None, self.is_state, self.is_latent)
        assert sum(kinds) <= 1, f"{self} is of several kinds"

    @property
    def keeps_all_tokens(self) -> bool:
        """True if no block is ever released before the request ends."""
        return self.sliding_window is None and self.chunk_size is None and not self.is_state

    @property
    def has_one_slot(self) -> bool:
        """True if a request holds one block, however many tokens it has."""
        return self.is_state and not self.keeps_boundaries

    def num_passed_blocks(self, num_computed_tokens: int, block_size: int) -> int:
        """Return the number of leading blocks which no token from position `num_computed_tokens` on needs."""
        if self.sliding_window is not None:
            return max(0, num_computed_tokens - self.sliding_window + 1) // block_size
        if self.chunk_size is not None:
            return num_computed_tokens // self.chunk_size * self.chunk_size // block_size
        if self.is_state:  # the next token needs the state after the one before it
            return max(0, num_computed_tokens - 1) // block_size
        return 0

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at any one time.

        `max_step_tokens`: the most tokens of the request that a step computes.
        """
        all_blocks = blocks_for(num_tokens, block_size)
        if self.keeps_all_tokens:
            return all_blocks
        if self.has_one_slot:
            return min(all_blocks, 1)
        # A step of n tokens reads and writes `kept` - 1 + n positions, which may start inside a block.
        kept = 2 if self.is_state else self.sliding_window or self.chunk_size or 1
        span = kept - 1 + max_step_tokens
        return min(all_blocks, (span + block_size - 2) // block_size + 1)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)
