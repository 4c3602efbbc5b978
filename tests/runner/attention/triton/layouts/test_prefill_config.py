"""The general kernel's layout: few for a model, and every query head of a KV head fits a tile."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.layouts.prefill_config import (
    LONG_QUERY_LEN,
    MAX_GROUP,
    PROGRAMS_PER_SM,
    prefill_config,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 16, 17, 71, MAX_GROUP])
@pytest.mark.parametrize("shared_bytes", [99 * 2**10, 227 * 2**10])
def test_a_tile_holds_a_query_token(dtype: torch.dtype, group: int, shared_bytes: int) -> None:
    """And there are at most three layouts, the last one for all long requests."""
    shape = HeadShape(num_q_heads=2 * group, num_kv_heads=2, key_dim=128, value_dim=128, dtype=dtype)
    configs = [
        prefill_config(shape, max_query_len=length, shared_bytes=shared_bytes)
        for length in (*range(LONG_QUERY_LEN + 1), 200, 8192)
    ]
    assert all(config.block_q(group) >= 1 for config in configs)
    assert len(set(configs)) <= 3
    assert len(set(configs[LONG_QUERY_LEN:])) == 1


def test_short_requests_take_small_tiles() -> None:
    """Most rows of a large one would be padding."""
    shape = HeadShape(num_q_heads=16, num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    rows = [prefill_config(shape, max_query_len=n, shared_bytes=227 * 2**10).block_m for n in (1, 8, 9, 32, 33)]
    assert rows == [16, 16, 64, 64, 128]


def test_the_keys_of_few_programs_are_split_and_fit_the_workspace() -> None:
    """One request of a long text fills the GPU, many requests do not split; short texts have nothing to split."""
    shape = HeadShape(num_q_heads=16, num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    config = prefill_config(shape, max_query_len=5, shared_bytes=227 * 2**10)
    splits = {n: config.num_splits(n, max_len=32768, num_sms=132) for n in (0, 8, 16, 64, 132, 133, 2048)}
    assert splits == {0: 1, 8: 16, 16: 16, 64: 4, 132: 2, 133: 1, 2048: 1}
    assert [config.num_splits(8, max_len=n, num_sms=132) for n in (256, 257, 1024)] == [1, 2, 4]
    assert all(n * count <= PROGRAMS_PER_SM * 132 for n, count in splits.items() if count > 1)
    long = prefill_config(shape, max_query_len=200, shared_bytes=227 * 2**10)
    assert long.num_splits(8, max_len=32768, num_sms=132) == 1
