"""The kernel chooses what torch chooses, whatever the numbers of experts and the dtypes; compiled for sm_90."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from piecegraph.passes.ops.moe.routing import ROUTE_TOKENS, route_tokens_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted

CASES = [(3, 8, 2), (2, 60, 4), (5, 128, 8), (1, 1, 1), (2, 5, 5)]
"""num_tokens, num_experts, top_k."""


def assert_right(
    logits: torch.Tensor, top_k: int, is_normalised: bool, found: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The weights are torch's, and those of different experts, of which equally probable ones may be others."""
    weights, ids = found
    wanted, _ = route_tokens_reference(logits, top_k, is_normalised, torch.float32)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    own = logits.float().softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights, own / own.sum(-1, keepdim=True) if is_normalised else own, rtol=1e-5, atol=1e-7)


def check(device: str, cases: Sequence[tuple[int, int, int]] = CASES) -> None:
    from piecegraph.passes.kernels.moe.choose import choose_on_gpu

    for number, (num_tokens, num_experts, top_k) in enumerate(cases):
        random = torch.Generator().manual_seed(number)
        logits = torch.randn(num_tokens, num_experts, generator=random).mul(3).to(device)
        for is_normalised in (False, True):
            assert_right(logits, top_k, is_normalised, choose_on_gpu(logits, top_k, is_normalised, torch.float32))
        wide = torch.cat([logits, logits], 1).half()[:, :num_experts]  # rows with gaps, of equal numbers here and there
        assert_right(wide, top_k, True, choose_on_gpu(wide, top_k, True, torch.float32))


def check_equal_and_bad_logits() -> None:
    """The lower of equal ones is chosen, NaN before all, as `topk` has it, and no row depends on another."""
    from piecegraph.passes.kernels.moe.choose import choose_on_gpu

    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [0.0, nan, 3.0, 1.0, 2.0], [-inf, 2.0, -inf, 1.0, -inf]])
    weights, ids = choose_on_gpu(logits, 3, True, torch.float32)
    assert ids[0].tolist() == [0, 1, 2] and torch.allclose(weights[0], torch.tensor(1 / 3))
    assert weights[1].isnan().all() and len({*ids[1].tolist()} & {*range(5)}) == 3
    assert ids[2].tolist() == [1, 3, 0] and weights[2, 2] == 0
    assert weights[2, 0] == pytest.approx(1 / (1 + torch.tensor(-1.0).exp().item()))


def check_interpreted() -> None:
    check("cpu")
    check_equal_and_bad_logits()


def test_the_interpreted_kernel_equals_the_reference() -> None:
    interpreted(check_interpreted)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (512, 10)])
def test_the_kernel_compiles_for_hopper(num_experts: int, top_k: int) -> None:
    from piecegraph.passes.kernels.moe.choose import choose_kernel

    logits, ids = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    compile_for_gpu(
        choose_kernel,
        {"logits": logits, "weights": logits, "ids": ids, "stride": 1, "NUM_EXPERTS": num_experts, "BLOCK": num_experts}
        | {"TOP_K": top_k, "SLOTS": 16, "IS_NORMALISED": True, "OVERLAP": True},
        {"num_warps": 1, "launch_pdl": True},
    )


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check("cuda", [*CASES, (300, 128, 8), (8192, 512, 10), (7, 4096, 6)])
    logits = torch.randn(33, 128, device="cuda", dtype=torch.bfloat16)
    weights, ids = ROUTE_TOKENS(logits, 8, True, torch.bfloat16)
    wanted = logits.float().softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights.float(), wanted / wanted.sum(-1, keepdim=True), rtol=1e-2, atol=1e-3)
