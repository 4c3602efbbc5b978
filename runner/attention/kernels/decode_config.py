"""How a decode launch is laid out: a pure function of what the host knows at capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SPLITS = 128
WORKSPACE_BYTES = 32 * 2**20
"""Partial results of all splits of a launch take no more; fewer splits do."""

MAX_HEADS_PER_PROGRAM = 64
LONG_SPLIT_LEN = 8192
"""Where one split a request would fill the GPU, a request longer than this still gets more, so that it does not
finish long after the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    block_n: int  # keys a tile
    num_warps: int
    num_stages: int  # of the software pipeline: tiles in flight, and the one at work
    num_splits: int  # at most so many programs share a request's keys
    min_split_len: int  # a request is split only into parts of at least so many keys
    carry_pages: bool = True  # look up a tile's blocks one tile ahead, so that its loads do not wait for the lookup
    pdl: bool = False  # start before the kernel ahead in the stream has ended, and wait for it inside

    def __post_init__(self) -> None:
        assert 1 <= self.num_splits <= MAX_SPLITS, self
        assert self.block_n >= 16 and self.block_n & (self.block_n - 1) == 0, self


def heads_per_program(group: int) -> int:
    """Query heads of one KV head that share a tile: all of them, unless they are very many. A power of two."""
    return min(max(16, 1 << (group - 1).bit_length()), MAX_HEADS_PER_PROGRAM)


def num_head_blocks(num_q_heads: int, num_kv_heads: int) -> int:
    """Programs that one split of one request takes."""
    group = num_q_heads // num_kv_heads
    return num_kv_heads * -(-group // heads_per_program(group))


def decode_config(
    *,
    num_reqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    block_size: int,
    max_len: int,
    num_sms: int,
) -> DecodeConfig:
    """The layout for any `num_reqs` requests of up to `max_len` tokens; nothing depends on actual lengths."""
    row_bytes = max(1 << (key_dim - 1).bit_length(), 1 << (value_dim - 1).bit_length()) * dtype.itemsize
    tile_rows = max(16, min(64, 16384 // row_bytes))  # a tile of keys takes 16 KiB, as does one of values
    programs = num_reqs * num_head_blocks(num_q_heads, num_kv_heads)
    splits = 2 * num_sms // programs  # two programs an SM
    min_split_len = 64 if splits > 1 else LONG_SPLIT_LEN
    splits = max(splits, min(8, -(-max_len // LONG_SPLIT_LEN)))
    affordable = WORKSPACE_BYTES // (num_reqs * num_q_heads * value_dim * 4)
    return DecodeConfig(
        block_n=tile_rows,
        num_warps=4,
        num_stages=3,
        num_splits=max(1, min(splits, affordable, -(-max_len // tile_rows), MAX_SPLITS)),
        min_split_len=min_split_len,
    )
