"""A token's choice of experts as one Triton kernel: softmax, the largest probabilities, and their sum, in one warp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel


def choose_on_gpu(
    logits: torch.Tensor, top_k: int, is_normalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `ops.moe.routing.route_tokens` on a GPU."""
    num_tokens, num_experts = logits.shape
    if top_k > num_experts:
        raise ValueError(f"a token cannot choose {top_k} of {num_experts} experts")
    weights = logits.new_empty((num_tokens, top_k), dtype=dtype)
    ids = logits.new_empty((num_tokens, top_k), dtype=torch.int64)
    if num_tokens == 0 or top_k == 0:
        return weights, ids
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    block = triton.next_power_of_2(num_experts)
    _choose.launch(
        (num_tokens, 1, 1),
        (logits, weights, ids, logits.stride(0)),
        {
            "NUM_EXPERTS": num_experts,
            "BLOCK": block,
            "TOP_K": top_k,
            "SLOTS": triton.next_power_of_2(top_k),
            "IS_NORMALISED": is_normalised,
        },
        num_warps=max(1, min(8, block // 1024)),
    )
    return weights, ids


@own_kernel
@triton.jit(do_not_specialize=["stride"])
def choose_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    logits,  # [num_tokens, NUM_EXPERTS] floats, rows `stride` apart
    weights,  # [num_tokens, TOP_K], written
    ids,  # [num_tokens, TOP_K] int64, written
    stride,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K, padded to a power of two
    IS_NORMALISED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(logits + token * stride + at, mask=at < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, 0))
    probability = powers / tl.sum(powers, 0)
    left = tl.where(probability != probability, 2.0, probability)  # NaN counts as more than any probability
    left = tl.where(at < NUM_EXPERTS, left, -1.0)
    chosen = tl.zeros([SLOTS], tl.float32)
    expert = tl.zeros([SLOTS], tl.int64)
    for choice in tl.static_range(TOP_K):
        largest, index = tl.max(left, 0, return_indices=True)
        chosen = tl.where(slot == choice, largest, chosen)
        expert = tl.where(slot == choice, index, expert)
        left = tl.where(at == index, -1.0, left)
    chosen = tl.where(chosen == 2.0, float("nan"), chosen)
    if IS_NORMALISED:
        chosen /= tl.sum(chosen, 0)
    out = token * TOP_K + slot
    tl.store(weights + out, chosen.to(weights.dtype.element_ty), mask=slot < TOP_K)
    tl.store(ids + out, expert, mask=slot < TOP_K)


_choose = OverlappedKernel(choose_kernel)
