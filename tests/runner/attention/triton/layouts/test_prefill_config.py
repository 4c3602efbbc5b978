"""The general kernel's layout: few for a model, and every query head of a KV head fits a tile."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.layouts.prefill_config import LONG_QUERY_LEN, MAX_GROUP, prefill_config


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
