"""The floor counts every byte once, and arithmetic where that takes longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.floor import ModelSize, RoutedExperts, cache_bytes, floor_seconds

RATES = Ceilings(read_bytes_per_s=1e9, flops_per_s=1e12)
EIGHT_BILLION = ModelSize(
    matmul_params=7_504_658_432, logits_params=525_336_576, weight_bytes=2 * 7_504_658_432, layers=()
)
"""The weights of Llama-3-8B that a step reads: all but the embedding."""


def layer(window: int = 0) -> AttentionLayer:
    return AttentionLayer(
        name="attention",
        num_q_heads=4,
        num_kv_heads=2,
        key_dim=8,
        value_dim=16,
        dtype=torch.bfloat16,
        scale=1.0,
        window=window,
        softcap=0.0,
        has_sinks=False,
    )


def test_cached_keys_and_values_are_read_once() -> None:
    assert cache_bytes([layer()], batch_size=3, context=100) == 3 * 100 * 2 * (8 + 16) * 2


def test_keys_and_values_count_in_the_dtype_of_their_cache() -> None:
    """In e4m3 they have half the bytes: the floor of an 8B's shape, 32 requests of 4096 tokens, on an H200."""
    whole = replace(layer(), num_q_heads=32, num_kv_heads=8, key_dim=128, value_dim=128)
    small = replace(whole, cache_dtype=torch.float8_e4m3fn)
    assert cache_bytes([small], 32, 4096) == cache_bytes([whole], 32, 4096) / 2
    h200 = Ceilings(read_bytes_per_s=4.3e12, flops_per_s=8e14)
    ms = [1e3 * floor_seconds(replace(EIGHT_BILLION, layers=(each,) * 32), h200, 32, 4096) for each in (whole, small)]
    assert ms == pytest.approx([7.49, 5.49], abs=0.01)


def test_values_that_are_part_of_keys_are_read_with_them() -> None:
    assert cache_bytes([replace(layer(), is_latent=True)], batch_size=3, context=100) == 3 * 100 * 2 * 8 * 2


def test_a_window_reads_no_more_than_it_sees() -> None:
    assert cache_bytes([layer(window=10)], batch_size=1, context=100) == cache_bytes([layer()], 1, 10)


@pytest.mark.parametrize(("context", "seen"), [(1, 1), (10, 10), (11, 1), (25, 5), (30, 10)])
def test_chunks_are_read_from_where_that_of_the_query_begins(context: int, seen: int) -> None:
    chunked = replace(layer(), chunk_size=10)
    assert cache_bytes([chunked], batch_size=3, context=context) == cache_bytes([layer()], 3, seen)


def test_experts_that_no_token_chose_are_not_read() -> None:
    """One token reads 8 of 128 experts, 100 tokens nearly all; a token is multiplied by its own 8 in any batch."""
    experts = RoutedExperts(params=96 * 10**4, num_bytes=192 * 10**4, num_experts=128, top_k=8)
    size = ModelSize(matmul_params=10**6, logits_params=0, weight_bytes=2 * 10**6, layers=(), experts=experts)
    assert size.bytes_read(1) == pytest.approx(8 * 10**4 + 192 * 10**4 * 8 / 128)
    assert size.bytes_read(2) == pytest.approx(8 * 10**4 + 192 * 10**4 * (1 - (120 / 128) ** 2))
    assert size.bytes_read(100) == pytest.approx(2 * 10**6, rel=0.002)
    assert size.params_a_token == pytest.approx(4 * 10**4 + 96 * 10**4 * 8 / 128)
    assert floor_seconds(size, RATES, 1, 100) == pytest.approx(0.2e-3)


def test_weights_bound_small_batches_and_arithmetic_large_ones() -> None:
    size = ModelSize(matmul_params=10**6, logits_params=10**5, weight_bytes=2 * 10**6, layers=())
    assert floor_seconds(size, RATES, 1, 100) == pytest.approx(2e-3)
    assert floor_seconds(size, RATES, 10_000, 100) == pytest.approx(2e-2)
    assert floor_seconds(size, RATES, 0, 100, prefill_tokens=10_000) == pytest.approx(1.8e-2, rel=1e-3)
