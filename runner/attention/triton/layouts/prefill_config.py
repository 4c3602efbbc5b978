"""The layout of a launch of the prefill kernel: a pure function of what the host knows at capture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape

MAX_GROUP = 128
"""The most query heads of one KV head: they fill a tile."""


LONG_QUERY_LEN = 65
"""The length from which on all queries take the same layout."""


MAX_SPLIT_ROWS = 64
"""The most rows of a tile whose keys are split: more rows are of long queries, which have programs enough."""

MAX_SPLITS = 16

MIN_SPLIT_LEN = 256
"""The fewest keys of a part that a tile's keys are split into."""

PROGRAMS_PER_SM = 2
"""Up to so many programs an SM, the keys of a tile are split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """The tile sizes and Triton options of a prefill launch."""

    block_m: int  # rows a tile: query tokens, each with all query heads of one KV head
    block_n: int  # keys a tile
    num_warps: int
    num_stages: int  # of the software pipeline: tiles in flight, and the one at work

    def block_q(self, group: int) -> int:
        """Return the number of query tokens a tile."""
        return self.block_m // group

    @property
    def can_split(self) -> bool:
        """Whether several programs may share the keys of a tile."""
        return self.block_m <= MAX_SPLIT_ROWS

    def num_splits(self, num_programs: int, *, max_len: int, num_sms: int) -> int:
        """Return how many programs share the keys of a tile, where a launch has `num_programs` unsplit.

        Nothing depends on actual lengths, only on their bound `max_len`.
        """
        if not self.can_split or num_programs == 0:
            return 1
        return max(1, min(PROGRAMS_PER_SM * num_sms // num_programs, -(-max_len // MIN_SPLIT_LEN), MAX_SPLITS))


@lru_cache(maxsize=4096)
def prefill_config(shape: HeadShape, *, max_query_len: int, shared_bytes: int) -> PrefillConfig:
    """Return the layout for requests of up to `max_query_len` rows, the same from `LONG_QUERY_LEN` on.

    A model has few different layouts, so that few kernels are compiled. `shared_bytes`: bytes of shared memory that a
    program may use.
    """
    dim, group = shape.padded_dim, shape.group
    rows = max(max_query_len, 1) * group
    is_roomy = shared_bytes >= 160 * 2**10
    if shape.dtype == torch.float32:  # multiplied without tensor cores, out of registers
        block_m = max(16, 1 << (group - 1).bit_length())
        return PrefillConfig(block_m=block_m, block_n=16 if dim > 64 else 32, num_warps=4, num_stages=2)
    block_n = 64 if dim <= 128 else 32
    num_stages = 3 if dim <= 128 else 2
    if rows <= 16:
        return PrefillConfig(block_m=16, block_n=block_n, num_warps=4, num_stages=num_stages)
    if group <= 64 and (rows <= 64 or not is_roomy):
        return PrefillConfig(block_m=64, block_n=block_n, num_warps=4, num_stages=num_stages if is_roomy else 2)
    return PrefillConfig(block_m=128, block_n=block_n, num_warps=8, num_stages=num_stages if is_roomy else 2)
