"""The op `piecegraph::route_tokens`: a token's choice of experts, from the router's logits."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.library import define_op


def route_tokens(
    logits: torch.Tensor, top_k: int, is_normalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and ids, `[num_tokens, top_k]`, of the experts with the largest `softmax(logits)`.

    `logits` is `[num_tokens, num_experts]`, floats. Probabilities are float32; the chosen ones are divided by their sum
    if `is_normalised`, and rounded to `dtype`. Ids are int64, in descending order of probability; NaN counts as
    largest, and of equal probabilities a GPU takes the lower id, where `torch.topk` promises none. Both results are new
    and contiguous.
    """
    if logits.is_cuda:
        from piecegraph.passes.kernels.moe.choose import choose_on_gpu

        return choose_on_gpu(logits, top_k, is_normalised, dtype)
    return route_tokens_reference(logits, top_k, is_normalised, dtype)


def route_tokens_reference(
    logits: torch.Tensor, top_k: int, is_normalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel computes, in plain torch."""
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), ids


def _fake(
    logits: torch.Tensor, top_k: int, is_normalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


ROUTE_TOKENS = define_op(
    "route_tokens(Tensor logits, int top_k, bool is_normalised, ScalarType dtype) -> (Tensor, Tensor)",
    route_tokens,
    _fake,
)
