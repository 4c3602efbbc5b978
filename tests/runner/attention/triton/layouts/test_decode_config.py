"""A decode launch's layout follows from counts alone, fills the GPU, and fits its workspace."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.attention.triton.layouts.decode_config import (
    ALONE_SHARED_BYTES,
    ALONE_SPLIT_LEN,
    ALONE_SPLITS,
    FULL,
    LONGEST_PART,
    MANY_ALONE_SPLITS,
    MAX_HEADS_PER_PROGRAM,
    SPLIT_BOUNDS,
    WORKSPACE_BYTES,
    decode_config,
    heads_per_program,
    num_head_blocks,
)
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape

SHAPES = [
    HeadShape(num_q_heads=16, num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16),
    HeadShape(num_q_heads=9, num_kv_heads=3, key_dim=64, value_dim=64, dtype=torch.float32),
    HeadShape(num_q_heads=71, num_kv_heads=1, key_dim=64, value_dim=64, dtype=torch.bfloat16),
    HeadShape(num_q_heads=8, num_kv_heads=4, key_dim=256, value_dim=256, dtype=torch.float16),
]


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (2, 16), (16, 16), (17, 32), (64, 64), (71, 64), (128, 64)])
def test_heads_per_program(group: int, rows: int) -> None:
    """All query heads of a KV head, in a tile of a size that tensor cores take."""
    assert heads_per_program(group) == rows


def test_programs_of_a_split() -> None:
    """One a KV head; two where its query heads do not fit into one."""
    assert [num_head_blocks(shape) for shape in SHAPES] == [8, 3, 2, 4]


@pytest.mark.parametrize("shape", SHAPES)
def test_partial_results_fit_the_workspace(shape: HeadShape) -> None:
    for num_reqs in (1, 2, 7, 32, 100, 256, 1024):
        for max_len in (1, 100, 5000, 10**6, None):
            config = decode_config(shape, num_reqs=num_reqs, max_len=max_len, num_sms=132)
            assert 1 <= config.num_splits <= config.split_bound <= SPLIT_BOUNDS[-1]
            num_partials = config.num_partials(num_reqs) * shape.num_q_heads
            assert config.num_splits == 1 or num_partials * shape.value_dim * 4 <= WORKSPACE_BYTES


@pytest.mark.parametrize("shape", SHAPES)
def test_any_length_takes_the_most_splits(shape: HeadShape) -> None:
    """So a workspace for any length is one for every length."""
    for num_reqs in (1, 3, 64, 256):
        splits = [
            decode_config(shape, num_reqs=num_reqs, max_len=max_len, num_sms=132).num_splits
            for max_len in (1, 64, 1000, 9000, 40_000, 10**7, None)
        ]
        assert splits == sorted(splits)


def test_few_requests_are_split_until_the_gpu_is_full() -> None:
    shape = SHAPES[0]
    splits = [decode_config(shape, num_reqs=n, max_len=2048, num_sms=132).num_splits for n in (1, 8, 64, 256)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] * num_head_blocks(shape) >= 132
    assert splits[-1] == 1


def test_one_request_has_smaller_tiles_where_its_parts_fill_the_gpu() -> None:
    """Sixteen parts of eight head blocks are 128 programs; of four they are half as many, and tiles stay larger."""
    for num_kv_heads, num_reqs, block_n, few_splits in (
        (8, 1, 64, MANY_ALONE_SPLITS),
        (4, 2, 64, MANY_ALONE_SPLITS),
        (4, 1, 128, ALONE_SPLITS),
    ):
        shape = HeadShape(
            num_q_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, key_dim=128, value_dim=128, dtype=torch.bfloat16
        )
        config = decode_config(shape, num_reqs=num_reqs, max_len=9000, num_sms=132, shared_bytes=232448)
        assert (config.block_n, config.few_splits, config.min_split_len) == (block_n, few_splits, 1024)
        assert config.num_splits == 2 * 132 // (num_reqs * num_kv_heads)
        short = decode_config(shape, num_reqs=num_reqs, max_len=256, num_sms=132, shared_bytes=232448)
        assert short.num_splits == short.few_splits == 256 // block_n


def test_a_long_request_is_split_in_any_batch() -> None:
    """It would otherwise end long after the others. Nobody else pays for it: one program a request, and a few."""
    config = decode_config(SHAPES[0], num_reqs=256, max_len=100_000, num_sms=132)
    assert config.num_splits > 1
    assert 0 < config.num_extra * num_head_blocks(SHAPES[0]) <= 2 * 132
    assert decode_config(SHAPES[0], num_reqs=256, max_len=2000, num_sms=132).num_extra == 0


def test_all_start_early_where_the_gpu_can() -> None:
    """What they read first nothing that may still run writes."""
    for num_reqs in (1, 8, 64, 256):
        for can_overlap in (True, False):
            config = decode_config(SHAPES[0], num_reqs=num_reqs, max_len=4096, num_sms=132, can_overlap=can_overlap)
            assert config.pdl == can_overlap


def expected_time(programs: float, slots: int, speed: float) -> float:
    """By what was measured: full waves, a last one that takes two fifths however few its programs are, and a tenth more
    where there is only one."""
    full, left = divmod(programs, slots)
    waves = full + (0.4 + 0.6 * left / slots if left else 0)
    return waves / speed / (0.9 if programs <= slots else 1.0)


@pytest.mark.parametrize("num_sms", [132, 128, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_tiling_should_be_faster(shape: HeadShape, num_sms: int) -> None:
    """Over batches that fill most of a bucket; parts fill one wave, better than whole requests in that tiling do."""
    room = {(16, 4): (2, 0.94), (8, 4): (3, 0.97), (8, 2): (4, 1.0)}  # programs a multiprocessor, and their speed
    if shape.padded_dim > 128:
        del room[8, 2]
    is_large = heads_per_program(shape.group) == MAX_HEADS_PER_PROGRAM
    if is_large:
        room = {(16, 8): (1, 1.0)}
    for num_reqs in (2, 5, 8, 16, 24, 32, 48, 64, 96, 128, 200, 256):
        programs = num_reqs * num_head_blocks(shape)
        config = decode_config(shape, num_reqs=num_reqs, max_len=2000, num_sms=num_sms)

        def shares(each: int, speed: float, programs: int = programs) -> float:
            batches = [programs * part for part in (0.8, 0.9, 1.0)]
            return sum(batch / each / num_sms / expected_time(batch, each * num_sms, speed) for batch in batches)

        tile = config.block_n * max(256, shape.padded_dim * shape.dtype.itemsize) // 1024
        each, speed = room[tile, config.num_warps]
        if config.few_splits == 1:
            assert shares(each, speed) >= max(shares(*other) for other in room.values()) - 1e-9, (num_reqs, config)
        else:
            launched = programs * config.few_splits
            filled = programs / (-(-programs // (each * num_sms)) * each * num_sms)
            assert filled < launched / (each * num_sms) <= 1, (num_reqs, config)
            assert filled < FULL


def test_whole_requests_take_the_tiling_that_was_fastest() -> None:
    """As measured: `TILINGS`."""
    fastest = {
        32: (64, 4),
        48: (32, 4),
        64: (64, 4),
        96: (32, 4),
        128: (32, 2),
        192: (32, 2),
        224: (32, 2),
        256: (32, 2),
    }
    for num_reqs, tiling in fastest.items():
        config = decode_config(SHAPES[0], num_reqs=num_reqs, max_len=4096, num_sms=132, shared_bytes=232_448)
        assert (config.block_n, config.num_warps) == tiling and config.few_splits == 1, num_reqs


def test_heads_that_fill_a_multiprocessor_keep_the_first_tiling() -> None:
    """One program is all it has room for, whatever the tile: nobody measured smaller ones there."""
    for num_reqs in (32, 64, 100, 128, 256):
        config = decode_config(SHAPES[2], num_reqs=num_reqs, max_len=4096, num_sms=132, shared_bytes=232_448)
        assert (config.block_n, config.num_warps) == (64, 8), num_reqs


def test_a_long_request_of_few_has_more_parts() -> None:
    """Two parts fill the GPU where 16 requests are short; a long one is not left to two programs."""
    config = decode_config(SHAPES[0], num_reqs=16, max_len=40_960, num_sms=132)
    assert (config.few_splits, config.num_splits, config.min_split_len) == (2, 5, LONGEST_PART)


def test_a_request_alone_takes_a_tiling_of_its_own_where_that_fits() -> None:
    """It has some parts however short, then parts that are worth a program. Smaller GPUs and more requests do not."""
    shape, shared = SHAPES[0], ALONE_SHARED_BYTES
    alone = decode_config(shape, num_reqs=1, max_len=40_960, num_sms=132, shared_bytes=shared)
    assert (alone.block_n, alone.few_splits, alone.min_split_len) == (64, MANY_ALONE_SPLITS, ALONE_SPLIT_LEN)
    for num_reqs, shared_bytes in ((1, shared - 1), (2, shared)):
        other = decode_config(shape, num_reqs=num_reqs, max_len=40_960, num_sms=132, shared_bytes=shared_bytes)
        assert (other.block_n, other.min_split_len) == (64, LONGEST_PART)
    assert decode_config(shape, num_reqs=1, max_len=200, num_sms=132, shared_bytes=shared).few_splits == 4
