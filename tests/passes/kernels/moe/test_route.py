"""Every pair stands once in a block of its expert, and what no pair fills says so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from piecegraph.passes.kernels.moe.config import num_blocks_bound
from tests.interpreter import interpreted

CASES = [(1, 1, 1, 16), (3, 2, 4, 16), (40, 2, 4, 16), (33, 8, 13, 32), (300, 4, 6, 64), (30, 8, 40, 16)]
"""num_tokens, top_k, num_experts, block_m; some have more pairs than a program looks at in one go."""


def expected(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[list[int], list[list[int]]]:
    """Experts of blocks, and their pairs."""
    experts, blocks = [], []
    for expert in range(num_experts):
        pairs = (topk_ids.flatten() == expert).nonzero().flatten().tolist()
        for start in range(0, len(pairs), block_m):
            block = pairs[start : start + block_m]
            blocks.append(block + [topk_ids.numel()] * (block_m - len(block)))
            experts.append(expert)
    return experts, blocks


def check(device: str, dtype: torch.dtype, cases: Sequence[tuple[int, int, int, int]] = CASES) -> None:
    from piecegraph.passes.kernels.moe.route import route

    for num_tokens, top_k, num_experts, block_m in cases:
        random = torch.Generator().manual_seed(num_tokens)
        for used in {num_experts, max(top_k, num_experts // 2)}:  # all experts, or the first half: others get nothing
            ids = torch.rand(num_tokens, used, generator=random).argsort(-1)[:, :top_k].to(dtype).contiguous()
            if num_experts > 2:  # some name no expert
                ids[::3, 0], ids[1::3, -1] = num_experts, -1
            routed = route(ids.to(device), num_experts, block_m)
            bound = num_blocks_bound(num_pairs=ids.numel(), num_experts=num_experts, block_m=block_m)
            experts, blocks = expected(ids, num_experts, block_m)
            assert routed.block_expert.tolist() == experts + [-1] * (bound - len(experts))
            assert routed.sorted_pairs.view(bound, block_m)[: len(blocks)].tolist() == blocks


def check_interpreted() -> None:
    check("cpu", torch.int64)
    check("cpu", torch.int32, CASES[:2])


def test_the_interpreted_kernel_equals_the_reference() -> None:
    interpreted(check_interpreted)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check("cuda", torch.int64, [*CASES, (260, 8, 128, 16), (2048, 8, 128, 128)])
    check("cuda", torch.int32)
