"""The layouts of the routed experts' kernels: a pure function of what the host knows, not of the choice of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from piecegraph.passes.kernels.common.gpu_limits import H200

MATVEC_MAX_SHARE = 4
"""The divisor of `num_experts` that bounds the pairs of token and expert that are multiplied as vectors.

Up to `num_experts / MATVEC_MAX_SHARE` pairs, few share an expert, and those that do find its weights in L2.
"""

MOST_ROWS_OF_64 = 128
"""Blocks have 64 rows as long as 1.5 times an expert's average number of rows is at most this, and 128 above that.

With 128 rows an expert on average (2,048 tokens of Qwen3-30B-A3B) blocks of 64 took 523 us a layer and blocks of 128
took 451; with 160 (8,192 tokens of Qwen3-Next) they took 1,647 and 1,614 (H200).
"""

GROUP = 8
"""Blocks of rows that take turns at each block of columns.

A block alone reads all of its expert's weights: 8,192 tokens of Mixtral 8x7B, whose experts are larger than L2, took
11,294 us a layer in groups of one, 10,030 and 10,230 in groups of 4 and 8, and 10,625 in groups of 64 (H200). Of 4 and
8 neither is better everywhere: Qwen3-30B-A3B took 1,304 and 1,270 us.
"""

ROUNDED_BLOCK_M = 64
"""The fewest rows of a block whose results in bfloat16 are rounded before they are summed."""

FLOAT32_BLOCK_K = 16
"""The products of float32 numbers that sorted kernels add one after another before `compensated.py` sums them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tile of one product. All fields are powers of two, except for the stages."""

    block_n: int  # columns of the result a program computes; of the first product, columns of gate and of up each
    block_k: int  # what it adds up at a time
    num_warps: int
    num_stages: int  # tiles of weights on their way, and the one at work


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    block_m: int  # rows of one expert a program multiplies; 1: products with a vector, nothing is sorted
    gate_up: Tile
    down: Tile
    group: int = GROUP  # blocks of rows that take turns at each block of columns

    @property
    def is_sorted(self) -> bool:
        return self.block_m > 1

    def results_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of an expert's results before those of a token are summed, in a model of `dtype`.

        It is float32, but in a model of bfloat16 blocks of at least `ROUNDED_BLOCK_M` rows (prompts, and large batches
        over few experts) round their results, as transformers does: those of a prompt are hundreds of megabytes, which
        float32 doubles (8,192 tokens of Qwen3-Next took 2,108 us a layer, and 1,889 with rounded results on an H200).
        float16 has not the range: results beyond 65,504 may cancel in the sum.
        """
        return dtype if dtype == torch.bfloat16 and self.block_m >= ROUNDED_BLOCK_M else torch.float32


@lru_cache(maxsize=4096)
def moe_config(
    *,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    size: int,
    itemsize: int = 2,
    shared_bytes: int = H200.shared_bytes,
) -> MoeConfig:
    """Return the layout for `num_tokens` tokens that choose `top_k` of `num_experts` experts.

    All arguments are at least 1. `shared_bytes` is the most shared memory of a program; where it is little, fewer tiles
    are on their way.
    """
    num_pairs = num_tokens * top_k
    if num_tokens == 1 or num_pairs * MATVEC_MAX_SHARE <= num_experts:
        # One token leaves few programs for the second product, which are smaller then.
        down = _tile(4, 1024, 8, 4) if num_tokens == 1 else _tile(8, 512, 4, 4)
        return MoeConfig(
            block_m=1,
            gate_up=_clipped(_tile(16, 256, 4, 3), size, hidden, itemsize),
            down=_clipped(down, hidden, size, itemsize),
        )
    # Half as many rows again as an expert has on average: most experts then fit into one block.
    rows = -(-3 * num_pairs // (2 * min(num_pairs, num_experts)))
    block_m = next((block for block in (16, 32) if block >= rows), 64 if rows <= MOST_ROWS_OF_64 else 128)
    gate_up, down = {
        16: (_tile(32, 128, 4, 4), _tile(64, 128, 4, 4)),
        32: (_tile(64, 128, 4, 3), _tile(64, 128, 4, 4)),
        64: (_tile(128, 64, 8, 4), _tile(128, 64, 8, 3)),
        128: (_tile(128, 64, 8, 4), _tile(256, 64, 8, 4)),
    }[block_m]
    if itemsize > 2:  # sums and what rounding lost of them are in registers
        gate_up, down = (
            replace(tile, block_n=min(tile.block_n, most), block_k=FLOAT32_BLOCK_K)
            for tile, most in ((gate_up, 64), (down, 128))
        )
    gate_up, down = _clipped(gate_up, size, hidden, itemsize), _clipped(down, hidden, size, itemsize)
    return MoeConfig(
        block_m=block_m,
        gate_up=_with_room(gate_up, block_m + 2 * gate_up.block_n, itemsize, shared_bytes),
        down=_with_room(down, block_m + down.block_n, itemsize, shared_bytes),
    )


def num_blocks_bound(*, num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the most blocks of rows, however pairs fall on experts: each expert's last block may be partly empty."""
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m


def _tile(block_n: int, block_k: int, num_warps: int, num_stages: int) -> Tile:
    return Tile(block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


def _clipped(tile: Tile, columns: int, depth: int, itemsize: int) -> Tile:
    """Return the tile clipped to the product's size and to its bytes, but at least the 16 that a tensor core takes."""
    block_k = tile.block_k * 2 // max(itemsize, 2)
    return Tile(
        block_n=min(tile.block_n, max(16, _power_of_two(columns))),
        block_k=max(16, min(block_k, _power_of_two(depth))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _with_room(tile: Tile, lines: int, itemsize: int, shared_bytes: int) -> Tile:
    """Return the tile with as many stages, up to its own, as shared memory has room for `lines` of it and x."""
    return replace(tile, num_stages=max(1, min(tile.num_stages, shared_bytes // (lines * tile.block_k * itemsize))))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
