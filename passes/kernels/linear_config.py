"""Which kernel a linear takes, and how it is laid out: a pure function of shapes, after sweeps on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MAX_WEIGHT_BYTES = 32 * 2**20
"""Larger weights go to the library: its matmuls then run at the memory's speed, and no launch is worth hiding."""

MATMUL_WEIGHT_BYTES = 16 * 2**20
"""The same for more than `MATVEC_ROWS` rows."""

MATVEC_ROWS = 2
"""Up to so many rows a dot product on ordinary cores reads weights as fast as they come; with four it computes
longer than it reads."""

BLOCK_M = 64
"""Rows a program of the matmul: the tensor cores' own, also where most are padding."""

SIZE_MULTIPLE = 64
"""Numbers of a row come in whole tiles, of twice as many where that goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """`block_m` is 0 for the matvec kernel, which takes all rows in one program."""

    block_m: int
    block_n: int  # columns of the result a program
    block_k: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=4096)
def linear_config(
    num_rows: int, num_columns: int, size: int, *, is_gated: bool, itemsize: int, num_sms: int
) -> LinearConfig | None:
    """The layout for `[num_rows, size] @ [num_columns, size].T`, twice the columns in the weight with `is_gated`;
    None where the library's matmul is at least as fast."""
    weight_bytes = num_columns * size * itemsize * (2 if is_gated else 1)
    if itemsize != 2 or size % SIZE_MULTIPLE or num_columns % 16 or weight_bytes > MAX_WEIGHT_BYTES or num_rows == 0:
        return None
    if num_rows <= MATVEC_ROWS:
        block_k = 1024 if is_gated or size < 2048 else 2048
        return LinearConfig(block_m=0, block_n=4, block_k=block_k, num_warps=4, num_stages=1)
    block_n = 32 if num_columns >= 2048 else 16
    programs = -(-num_rows // BLOCK_M) * -(-num_columns // block_n)
    if weight_bytes > MATMUL_WEIGHT_BYTES or programs > num_sms:
        return None  # a second wave: the library's larger tiles read each weight once
    block_k = 128 if size % 128 == 0 else SIZE_MULTIPLE
    return LinearConfig(block_m=BLOCK_M, block_n=block_n, block_k=block_k, num_warps=4, num_stages=4 if is_gated else 6)
