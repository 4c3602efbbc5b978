"""The routed experts as Triton kernels, chosen by the number of tokens."""

from __future__ import annotations

import torch

from piecegraph.passes.kernels.common.gpu_limits import limits_of
from piecegraph.passes.kernels.moe.config import MoeConfig, moe_config
from piecegraph.passes.kernels.moe.grouped import moe_grouped
from piecegraph.passes.kernels.moe.matvec import moe_matvec

ALIGNMENT = 16
"""The alignment in bytes that kernels assume of addresses."""


def moe_experts_on_gpu(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    num_all_experts: int | None = None,
    config: MoeConfig | None = None,
) -> torch.Tensor:
    """Run `ops.moe.experts.moe_experts` on a GPU. `config` replaces the layout of `moe_config`."""
    num_tokens, hidden = x.shape
    if num_tokens == 0 or gate_up.shape[0] == 0:
        return x.new_zeros(x.shape)
    if config is None:
        config = moe_config(
            num_tokens=num_tokens,
            top_k=topk_ids.shape[1],
            num_experts=num_all_experts or gate_up.shape[0],
            hidden=hidden,
            size=down.shape[2],
            itemsize=x.element_size(),
            shared_bytes=limits_of(x.device).shared_bytes,
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    x, topk_weights, topk_ids = _aligned(x), _aligned(topk_weights.contiguous()), _aligned(topk_ids.contiguous())
    run = moe_grouped if config.is_sorted else moe_matvec
    return run(x, topk_weights, topk_ids, _aligned(gate_up), _aligned(down), activation, config)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its address is not aligned. A row of a buffer may not be; weights always are."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
