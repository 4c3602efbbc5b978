"""The ops `piecegraph::add_norm_linear` and `piecegraph::linear_add_norm_linear`.

The first is a residual add, the norm of the sum, and a linear over the norm. The second starts with the linear that
produces the summand.
"""

from __future__ import annotations

import torch

from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.linear import linear
from piecegraph.passes.ops.rms_norm import add_rms_norm


def add_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(linear(normed, weight, bias, activation), total)` of `normed, total = add_rms_norm(x, residual, ...)`.

    `x` and `residual` are `[..., size]` of one shape and dtype, `weight` is `[num_columns, size]` and `norm_weight`
    `[size]`, both contiguous; a kernel reads the two before the kernel ahead of it has ended. The norm is rounded to
    its dtype before it is multiplied, as by the separate ops. One row of bfloat16 or float16 on a GPU takes one kernel,
    unless the weight is streamed faster by a kernel of its own; otherwise the two ops' kernels run.
    Both results are new and contiguous.
    """
    if x.is_cuda:
        from piecegraph.passes.kernels.norm.norm_linear import add_norm_linear_on_gpu, norm_linear_layout

        config = norm_linear_layout(x, weight, activation)
        if config is not None:
            return add_norm_linear_on_gpu(x, residual, norm_weight, eps, offset, weight, bias, activation, config)
    normed, total = add_rms_norm(x, residual, norm_weight, eps, offset)
    return linear(normed, weight, bias, activation, is_normed=True), total


def linear_add_norm_linear(
    x: torch.Tensor,
    in_weight: torch.Tensor,
    in_bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `add_norm_linear(linear(x, in_weight, in_bias), residual, ...)`.

    `x` is `[..., in_size]`, `residual` `[..., size]`. On a GPU, where few programs would have long sums, the sums of
    the first linear are split and the norm adds the parts, which are not rounded before that.
    """
    if x.is_cuda:
        from piecegraph.passes.kernels.common.gpu_limits import gpu_limits
        from piecegraph.passes.kernels.linear.linear_parts import linear_parts_on_gpu, parts_config

        num_rows, in_size = x.numel() // x.shape[-1], x.shape[-1]
        itemsize = x.element_size() if x.dtype == in_weight.dtype == residual.dtype else 0
        config = parts_config(num_rows, in_weight.shape[0], in_size, itemsize=itemsize, gpu=gpu_limits(x.get_device()))
        if config is not None:
            from piecegraph.passes.kernels.norm.rms_norm import add_rms_norm_of_parts_on_gpu

            parts = linear_parts_on_gpu(x.reshape(num_rows, in_size).contiguous(), in_weight, config)
            normed, total = add_rms_norm_of_parts_on_gpu(parts, in_bias, residual, norm_weight, eps, offset)
            return linear(normed, weight, bias, activation, is_normed=True), total
    added = linear(x, in_weight, in_bias, "")
    return add_norm_linear(added, residual, norm_weight, eps, offset, weight, bias, activation)


def _results(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if activation else 1))), x.new_empty(x.shape)


ADD_NORM_LINEAR = define_op(
    "add_norm_linear(Tensor x, Tensor residual, Tensor? norm_weight, float eps, float offset, Tensor weight, "
    "Tensor? bias, str activation) -> (Tensor, Tensor)",
    add_norm_linear,
    _results,
)

LINEAR_ADD_NORM_LINEAR = define_op(
    "linear_add_norm_linear(Tensor x, Tensor in_weight, Tensor? in_bias, Tensor residual, Tensor? norm_weight, "
    "float eps, float offset, Tensor weight, Tensor? bias, str activation) -> (Tensor, Tensor)",
    linear_add_norm_linear,
    lambda x, in_weight, in_bias, residual, *rest: _results(residual, residual, *rest),
)
