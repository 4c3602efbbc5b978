"""The layout of a decode launch: a pure function of what the host knows at capture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape


class _Tiling(NamedTuple):
    """The tile and warps of a program, and the number of programs that fit on each multiprocessor of an H200."""

    tile_bytes: int  # bytes of keys, and as many of values
    num_warps: int
    programs_per_sm: int
    speed: float = 1.0  # relative, while its programs fill the GPU


TILINGS = (_Tiling(16384, 4, 2, 0.94), _Tiling(8192, 4, 3, 0.97), _Tiling(8192, 2, 4))
"""The tilings to choose from, by their speed and by how well programs fill their waves: see `_share_of_speed`.

Attention of a layer of Qwen3-0.6B (8 KV heads, H200), microseconds, with each of these in this order. 48 requests of
580 tokens: 38, 30 and 33; 64 of them: 41, 48 and 37. Lengths as in the middle of an offline workload, the longest
first: 75, 83 and 86 for 55 requests in 64 rows, 107, 101 and 106 for 80 in 96, 146, 147 and 140 for 127 in 128, 161,
150 and 165 for 144 in 160, 175, 169 and 164 for 182 in 192, 179, 177 and 175 for 203 in 224, 174, 171 and 162 for 256.
"""

LAST_WAVE = 0.4
"""The share of a wave's time that the last wave takes however few programs it has; the rest goes by their number."""

ONE_WAVE = 0.9
"""The share of its speed that a launch reaches if all programs run at once: all wait for the longest request."""

BATCHES = (0.8, 0.9, 1.0)
"""The shares of a launch's rows that typical batches fill."""

SPLIT_BOUNDS = (1, 16, 64, 128)
"""Numbers of splits that kernels are compiled for: few, so that few kernels are compiled."""

WORKSPACE_BYTES = 32 * 2**20
"""The most bytes of partial results of all splits of a launch; the number of splits is limited accordingly."""

MAX_HEADS_PER_PROGRAM = 64

NUM_STAGES = 3
"""Stages of the software pipeline: two tiles in flight, and the one at work."""

FULL = 0.9
"""A launch whose programs fill at least this share of the waves it takes is not split."""

ALONE_SHARE = 16
"""A launch that takes at most 1 / `ALONE_SHARE` of the GPU, unsplit, has few requests of a small model.

There the latency of the first tile counts, and the number of parts that are combined. So such a launch takes
`MANY_ALONE_TILING` where `MANY_ALONE_SPLITS` parts of each request fill the GPU, else larger tiles in up to
`ALONE_SPLITS` parts (7.0 instead of 8.1 us at 580 tokens, 13 instead of 14 at 4096, H200); longer requests have parts
of `ALONE_SPLIT_LEN`.
"""

ALONE_SHARED_BYTES = 2 * 3 * 32768 + 16384
"""Shared memory of an SM that this takes: three tiles in flight, and what else a program needs."""

ALONE_TILING = _Tiling(32768, 4, 1)

ALONE_SPLITS = 9

MANY_ALONE_TILING = _Tiling(16384, 4, 1)
"""The tiling of such a launch where `MANY_ALONE_SPLITS` parts of each request fill the GPU.

A step of Qwen3-0.6B with one request took 0.616 ms instead of 0.643 at 150 tokens, 0.627 instead of 0.651 at 512,
0.668 as before at 1,100, and 0.793 instead of 0.818 at 4,096; one of Llama-8B took what it took. A layer of half of
Llama-8B, with half as many programs, took 0.7 to 1.6 % longer at 150 to 1,100 tokens and 6.7 % longer at 32,768 (H200,
2026-11-29).
"""

MANY_ALONE_SPLITS = 16

ALONE_SPLIT_LEN = 1024

OTHER_SHARED_BYTES = 4608
"""Shared memory of a program beside its tiles."""

LONGEST_PART = 8192
"""The most keys of a part where requests are split to fill the GPU, up to `MIN_LONG_SPLITS` parts."""

MIN_LONG_SPLITS = 8

LONG_SPLIT_LEN = 2048
"""The length from which on a request is split although one split a request fills the GPU, up to `LONG_SPLITS` ways,
so that it does not finish long after the others."""

LONG_SPLITS = 16

NUM_EXTRA = 16
"""Splits of such requests together, beyond one each. In a batch with more long requests the GPU is full to the end.

As splits of every request in the grid, 4 at 256 requests, they took 24 of 183 us where nothing was long; 32 extra
programs after all others in the grid took 5, and 4 of 32 with 32 requests (H200); 16 were not measured separately.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """The tile sizes, splits and Triton options of a decode launch."""

    block_n: int  # keys a tile
    num_warps: int
    num_stages: int  # of the software pipeline: tiles in flight, and the one at work
    num_splits: int  # the most programs that share a request's keys
    min_split_len: int  # the fewest keys of a part that a request is split into
    few_splits: int = 1  # but up to this many parts may have any length, where there are tiles for them
    num_extra: int = 0  # 0: every request has `num_splits` programs; else each has one, and all share this many more
    carry_pages: bool = True  # look up a tile's blocks one tile early, so that its loads do not wait for the lookup
    pdl: bool = False  # start before the preceding kernel in the stream has ended, and wait for it inside

    def __post_init__(self) -> None:
        assert 1 <= self.num_splits <= SPLIT_BOUNDS[-1], self
        assert self.block_n >= 16 and self.block_n & (self.block_n - 1) == 0, self
        assert self.num_extra == 0 or self.num_splits > 1 == self.few_splits, self
        assert self.few_splits <= self.num_splits, self

    def num_partials(self, num_reqs: int) -> int:
        """Return the rows of partial results that a launch needs, of all query heads each."""
        return num_reqs + self.num_extra if self.num_extra else num_reqs * self.num_splits

    @property
    def split_bound(self) -> int:
        """The number of splits that the kernel is compiled for, at least `num_splits`."""
        return next(bound for bound in SPLIT_BOUNDS if bound >= self.num_splits)

    @property
    def compiled_for(self) -> tuple[object, ...]:
        """The values that configs with the same compiled kernel share."""
        has_extra = self.num_extra > 0
        return (
            self.block_n, self.num_warps, self.num_stages, self.split_bound, has_extra, self.carry_pages, self.pdl,
        )  # fmt: skip


def heads_per_program(group: int) -> int:
    """Return how many query heads of one KV head share a tile: all, up to a maximum. The result is a power of two."""
    return min(max(16, 1 << (group - 1).bit_length()), MAX_HEADS_PER_PROGRAM)


def num_head_blocks(shape: HeadShape) -> int:
    """Return the number of programs of one split of one request."""
    return shape.num_kv_heads * -(-shape.group // heads_per_program(shape.group))


@lru_cache(maxsize=4096)
def decode_config(
    shape: HeadShape,
    *,
    num_reqs: int,
    max_len: int | None,
    num_sms: int,
    shared_bytes: int = 0,
    can_overlap: bool = False,
) -> DecodeConfig:
    """Return the layout for any `num_reqs` requests of up to `max_len` tokens (None: any).

    Nothing depends on actual lengths. A longer `max_len` never gives fewer splits.
    """
    programs = num_reqs * num_head_blocks(shape)
    block_m = heads_per_program(shape.group)
    is_alone = programs <= num_sms // ALONE_SHARE and shared_bytes >= ALONE_SHARED_BYTES
    if is_alone and shape.padded_dim <= 128 and block_m == 16:  # others have no registers for such tiles
        is_filled = MANY_ALONE_SPLITS * programs >= FULL * num_sms
        tiling, parts = MANY_ALONE_TILING if is_filled else ALONE_TILING, 2 * num_sms // programs
    else:
        tiling, parts = _tiling(shape, programs, num_sms, shared_bytes)
    row_bytes = shape.padded_dim * shape.dtype.itemsize
    block_n = max(16, min(tiling.tile_bytes // 256, tiling.tile_bytes // row_bytes))
    affordable = WORKSPACE_BYTES // (shape.num_q_heads * shape.value_dim * 4)  # rows of partial results
    most = min(affordable // num_reqs, _parts(max_len, block_n, SPLIT_BOUNDS[-1]))
    splits, few_splits, num_extra, min_split_len = 1, 1, 0, LONG_SPLIT_LEN
    if tiling in (ALONE_TILING, MANY_ALONE_TILING):
        splits, min_split_len = min(parts, most), ALONE_SPLIT_LEN
        few_splits = min(ALONE_SPLITS if tiling is ALONE_TILING else MANY_ALONE_SPLITS, max(splits, 1))
    elif parts > 1:
        splits, min_split_len = min(max(parts, _parts(max_len, LONGEST_PART, MIN_LONG_SPLITS)), most), LONGEST_PART
        few_splits = max(min(parts, most), 1)
    elif _parts(max_len, LONG_SPLIT_LEN, LONG_SPLITS) > 1 and affordable > num_reqs:
        splits, num_extra = _parts(max_len, LONG_SPLIT_LEN, LONG_SPLITS), min(NUM_EXTRA, affordable - num_reqs)
    return DecodeConfig(
        block_n=block_n,
        num_warps=tiling.num_warps if block_m < MAX_HEADS_PER_PROGRAM else 8,
        num_stages=NUM_STAGES,
        num_splits=max(splits, 1),
        min_split_len=min_split_len,
        few_splits=few_splits,
        num_extra=num_extra,
        pdl=can_overlap,
    )


def _tiling(shape: HeadShape, programs: int, num_sms: int, shared_bytes: int) -> tuple[_Tiling, int]:
    """Return the tiling with which `programs` should be fastest, and into how many parts requests are split.

    Requests are split, to fill one wave, only where whole requests would leave too much of the wave empty.
    """
    fit = [tiling for tiling in TILINGS if tiling.num_warps == 4 or shape.padded_dim <= 128]
    is_large = heads_per_program(shape.group) == MAX_HEADS_PER_PROGRAM  # its query heads take memory too
    slots = {each: num_sms * (1 if is_large else _programs_per_sm(each, shared_bytes)) for each in fit}

    def fill(tiling: _Tiling, parts: int) -> tuple[float, int, int]:
        waves = -(-programs * parts // slots[tiling])
        return round(programs * parts / (waves * slots[tiling]), 2), -waves, -parts

    def speed(tiling: _Tiling) -> float:
        alike = 1.0 if is_large else tiling.speed  # those were measured with several programs a multiprocessor
        return alike * sum(_share_of_speed(part * programs / slots[tiling]) for part in BATCHES)

    whole = max(fit, key=speed)
    choices = [(each, slots[each] // programs) for each in fit if each.num_warps == 4 and slots[each] // programs > 1]
    if fill(whole, 1)[0] >= FULL or not choices:
        return whole, 1
    tiling, parts = max(choices, key=lambda choice: fill(*choice))
    return (tiling, parts) if fill(tiling, parts)[0] > fill(whole, 1)[0] else (whole, 1)


def _share_of_speed(waves: float) -> float:
    """Return the share of the GPU's speed that programs for `waves` waves reach: ideal time by actual time."""
    full, last = divmod(waves, 1)
    took = full + (LAST_WAVE + (1 - LAST_WAVE) * last if last else 0)
    return waves / took * (ONE_WAVE if waves <= 1 else 1)


def _programs_per_sm(tiling: _Tiling, shared_bytes: int) -> int:
    """Return how many programs fit on an SM with `shared_bytes` of shared memory (0: not known)."""
    needed = 2 * (NUM_STAGES - 1) * tiling.tile_bytes + OTHER_SHARED_BYTES
    return max(1, min(tiling.programs_per_sm, shared_bytes // needed)) if shared_bytes else tiling.programs_per_sm


def _parts(length: int | None, part: int, most: int) -> int:
    """Return the number of parts of `part` tokens in a request of up to `length` tokens (None: any), at most `most`."""
    return most if length is None else min(-(-length // part), most)
