"""The ops `piecegraph::rms_norm` and `piecegraph::add_rms_norm`: a norm over the last dim, alone or after a residual
add."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.library import define_op


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    """Return `x / rms(x) * (offset + weight)`, where `rms(x) = sqrt(mean(x * x) + eps)` over the last dim.

    `x` is `[..., size]` with any strides; `weight` is `[size]` of any float dtype, or None for no factor. On a GPU
    `size` is at most `MAX_NORM_SIZE` (`kernels/common/gpu_limits.py`), and in a CUDA graph no kernel of that graph may
    write `weight`, which is read before the preceding kernel has ended. The norm is computed in float32 and rounded
    once. The result is a new contiguous tensor of `x`'s shape and dtype.
    """
    if x.is_cuda:
        from piecegraph.passes.kernels.norm.rms_norm import rms_norm_on_gpu

        return rms_norm_on_gpu(x, weight, eps, offset)
    return rms_norm_reference(x, weight, eps, offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rms_norm(total), total)` with `total = x + residual`, rounded to its dtype before it is normed.

    `x` and `residual` are of one shape and dtype; both results are new and contiguous.
    """
    if x.is_cuda:
        from piecegraph.passes.kernels.norm.rms_norm import add_rms_norm_on_gpu

        return add_rms_norm_on_gpu(x, residual, weight, eps, offset)
    return add_rms_norm_reference(x, residual, weight, eps, offset)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    """Return what the kernel computes, in plain torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * (weight.to(wide.dtype) + offset)
    return normed.to(x.dtype).contiguous()


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel computes, in plain torch."""
    total = (x + residual).contiguous()
    return rms_norm_reference(total, weight, eps, offset), total


def _like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


RMS_NORM = define_op(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset) -> Tensor",
    rms_norm,
    lambda x, weight, eps, offset: _like(x),
)

ADD_RMS_NORM = define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)",
    add_rms_norm,
    lambda x, residual, weight, eps, offset: (_like(x), _like(x)),
)
