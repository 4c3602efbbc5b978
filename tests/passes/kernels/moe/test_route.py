"""Every pair stands once in a block of its expert, and what no pair fills says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from piecegraph.passes.kernels.moe.config import num_blocks_bound
from tests.compiled_for_gpu import compile_for_gpu
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


def check_large_ids() -> None:
    """Ids of 64 bits whose lower half would name an expert name none."""
    from piecegraph.passes.kernels.moe import route

    ids = torch.tensor([[2**32, 1], [2**33 + 1, 0], [-(2**32) + 1, 1]])
    for few in (route.FEW_PAIRS, 0):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(route, "FEW_PAIRS", few)
            routed = route.route(ids, 4, 16)
        blocks = routed.sorted_pairs.view(-1, 16)[:2].tolist()
        assert routed.block_expert.tolist()[:3] == [0, 1, -1] and blocks == [[3] + [6] * 15, [1, 5] + [6] * 14]


def check_interpreted() -> None:
    check("cpu", torch.int64)
    check("cpu", torch.int32, CASES[:2])


def check_many_pairs() -> None:
    """The kernels for many pairs, with counts added up two chunks at a time, too, and the same cases as for few."""
    from piecegraph.passes.kernels.moe import route, route_many

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(route, "FEW_PAIRS", 0)
        check("cpu", torch.int64)
        patched.setattr(route_many, "CHUNKS", 2)
        check("cpu", torch.int32, [(300, 4, 6, 64), (600, 2, 5, 16)])


@pytest.mark.parametrize("case", [check_interpreted, check_many_pairs, check_large_ids])
def test_the_interpreted_kernel_equals_the_reference(case: Callable[[], None]) -> None:
    interpreted(case)


def test_the_kernels_compile_for_hopper() -> None:
    from piecegraph.passes.kernels.moe import route, route_many

    ids, numbers = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    of_chunks = {"NUM_EXPERTS": 512, "BINS": 512, "CHUNK": 128, "OVERLAP": True}
    sizes = {"num_pairs": 81920, "num_blocks": 1664}
    for kernel, arguments, num_warps in (
        (
            route.route_kernel,
            {"topk_ids": ids, "sorted_pairs": numbers, "block_expert": numbers, "num_pairs": 320, "num_blocks": 320}
            | {"BINS": 512, "BLOCK_M": 16, "CHUNK": 512, "OVERLAP": True},
            4,
        ),
        (route_many.count_kernel, {"topk_ids": ids, "counts": numbers, "num_pairs": 81920, **of_chunks}, 4),
        (
            route_many.add_up_kernel,
            {"counts": numbers, "before": numbers, "totals": numbers, "num_chunks": 640}
            | {"BINS": 512, "OWN": 16, "CHUNKS": route_many.CHUNKS, "OVERLAP": True},
            8,
        ),
        (
            route_many.begin_kernel,
            {"totals": numbers, "first": numbers, "sorted_pairs": numbers, "block_expert": numbers, **sizes}
            | {"BINS": 512, "BLOCK_M": 64, "OVERLAP": True},
            4,
        ),
        (
            route_many.place_kernel,
            {"topk_ids": ids, "before": numbers, "first": numbers, "sorted_pairs": numbers, "num_pairs": 81920}
            | of_chunks,
            4,
        ),
    ):
        compile_for_gpu(kernel, arguments, {"num_warps": num_warps, "launch_pdl": True})


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    many = [(8192, 10, 512, 64), (20000, 8, 64, 128), (40000, 10, 128, 128)]
    check("cuda", torch.int64, [*CASES, (260, 8, 128, 16), (2048, 8, 128, 128), *many])
    check("cuda", torch.int32)
