"""The layout of the kernels depends on sizes alone, covers every product, and follows how many rows an expert gets."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from piecegraph.passes.kernels.moe.config import MoeConfig, moe_config, num_blocks_bound

QWEN3 = {"top_k": 8, "num_experts": 128, "hidden": 2048, "size": 768}
MIXTRAL = {"top_k": 2, "num_experts": 8, "hidden": 4096, "size": 14336}
SHARED_MEMORY = 227 * 1024
"""The shared memory that a program can have on an H200."""


def config(num_tokens: int, shape: dict[str, int], itemsize: int = 2) -> MoeConfig:
    return moe_config(num_tokens=num_tokens, **shape, itemsize=itemsize)


def test_few_pairs_of_token_and_expert_take_the_matvec_kernels() -> None:
    """One token always; more while experts are rarely shared."""
    assert not config(1, QWEN3).is_sorted and not config(1, MIXTRAL).is_sorted
    assert not config(4, QWEN3).is_sorted and config(5, QWEN3).is_sorted
    assert config(2, MIXTRAL).is_sorted


def test_a_block_of_rows_holds_what_most_experts_get() -> None:
    assert [config(tokens, QWEN3).block_m for tokens in (8, 32, 128, 256, 512, 1024)] == [16, 16, 16, 32, 64, 64]
    assert config(1365, QWEN3).block_m == 64 and config(1366, QWEN3).block_m == 128
    assert [config(tokens, MIXTRAL).block_m for tokens in (8, 32, 128, 256, 2048)] == [16, 16, 64, 64, 128]


def test_results_in_bfloat16_are_rounded_before_they_are_summed_where_prompts_make_many() -> None:
    """Results in float16 are not rounded, since two that overflow may cancel."""
    layouts = [config(tokens, QWEN3) for tokens in (1, 8, 256, 512, 4096)]
    wide, narrow = [torch.float32], [torch.bfloat16]
    assert [layout.results_dtype(torch.bfloat16) for layout in layouts] == wide * 3 + narrow * 2
    assert {layout.results_dtype(dtype) for layout in layouts for dtype in (torch.float16, torch.float32)} == {*wide}


@pytest.mark.parametrize("shared_bytes", [SHARED_MEMORY, 163 * 1024, 99 * 1024])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_are_powers_of_two_that_tensor_cores_take_and_that_fit(itemsize: int, shared_bytes: int) -> None:
    sizes = (1, 2, 7, 64, 1000, 5000), (1, 2, 8), (8, 128), (24, 64, 2048, 4096), (24, 96, 768, 14336)
    for num_tokens, top_k, num_experts, hidden, size in itertools.product(*sizes):
        layout = moe_config(
            num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, hidden=hidden, size=size, itemsize=itemsize,
            shared_bytes=shared_bytes,
        )  # fmt: skip
        for tile, rows in ((layout.gate_up, 2), (layout.down, 1)):
            for block in (tile.block_n, tile.block_k, tile.num_warps, layout.block_m):
                assert block & (block - 1) == 0, layout
            assert tile.block_k >= 16
            if layout.is_sorted:
                assert tile.block_n >= 16 and layout.block_m >= 16
            tiles = (rows * tile.block_n + layout.block_m) * tile.block_k * itemsize
            assert tiles * tile.num_stages <= (shared_bytes if layout.is_sorted else SHARED_MEMORY), layout


def test_sorted_rows_of_float32_are_multiplied_as_exactly_as_can_be() -> None:
    for num_tokens in (8, 64, 256, 2048):
        for shape in (QWEN3, MIXTRAL):
            wide, narrow = config(num_tokens, shape, itemsize=4), config(num_tokens, shape)
            assert (wide.gate_up.block_k, wide.down.block_k) == (16, 16)
            assert (wide.block_m, wide.gate_up.block_n) == (narrow.block_m, min(64, narrow.gate_up.block_n))
            assert wide.down.block_n == min(128, narrow.down.block_n)


def test_no_distribution_of_pairs_takes_more_blocks_than_the_bound_and_one_takes_as_many() -> None:
    draw = random.Random(0)
    for num_pairs, num_experts, block_m in itertools.product((1, 2, 5, 16, 33, 64), (1, 3, 8), (16, 32)):
        bound = num_blocks_bound(num_pairs=num_pairs, num_experts=num_experts, block_m=block_m)
        taken = []
        for _ in range(200):
            counts = [0] * num_experts
            for _ in range(num_pairs):
                counts[draw.randrange(num_experts)] += 1
            taken.append(sum(-(-count // block_m) for count in counts))
        worst = [1] * min(num_pairs, num_experts)  # one each, and the rest to the first
        worst[0] += num_pairs - len(worst)
        taken.append(sum(-(-count // block_m) for count in worst))
        assert max(taken) == bound, (num_pairs, num_experts, block_m)
