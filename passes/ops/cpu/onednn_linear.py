"""The op `piecegraph::onednn_linear`: a linear in float32 on a CPU by oneDNN, which torch itself computes by MKL."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from piecegraph.passes.ops.library import define_op


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, a new contiguous tensor `[..., num_columns]`.

    `x` is `[..., size]`, `weight` `[num_columns, size]`, contiguous or the transpose of a contiguous tensor, `bias`
    `[num_columns]`. In other dtypes than float32, on other devices than a CPU, and in a torch without oneDNN it is
    torch's linear. Nothing is mutated.
    """
    if x.dtype is torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available():
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


ONEDNN_LINEAR = define_op(
    "onednn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    onednn_linear,
    lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
