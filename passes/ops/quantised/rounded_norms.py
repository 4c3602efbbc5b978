"""RMS norms whose result is rounded for a quantised linear: `piecegraph::rms_norm_rounded`, and the same after a
residual add (`add_rms_norm_rounded`) and after a sum over the ranks too (`all_reduce_add_rms_norm_rounded`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from piecegraph.passes.ops.collectives import ALL_REDUCE_ADD_NORM_LINEAR, ALL_REDUCE_ADD_RMS_NORM, summed
from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.norm_linear import ADD_NORM_LINEAR
from piecegraph.passes.ops.op_types import OpOverload
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, round_rows, rounded_like
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM, add_rms_norm, rms_norm


def rms_norm_rounded(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, group: int, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `round_rows(rms_norm(x, weight, eps, offset), group, stored)`: values and scales.

    The norm is rounded to the dtype of `x` first, so that the bits are those of the separate ops; on a GPU, where the
    kernel may add squares in another order, a norm in float32 may differ in its last bits.
    """
    if x.is_cuda and _fits_a_program(x.shape[-1], group):
        from piecegraph.passes.kernels.norm.rms_norm import rms_norm_rounded_on_gpu

        return rms_norm_rounded_on_gpu(x, weight, eps, offset, _length(x, group), stored)
    return round_rows(rms_norm(x, weight, eps, offset), group, stored)


def add_rms_norm_rounded(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    group: int,
    stored: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `round_rows` of the norm of `add_rms_norm(x, residual, weight, eps, offset)`, and the sum.

    `x` and `residual` are of one shape and dtype; all results are new and contiguous, and the bits are those of the
    separate ops, with the exception of `rms_norm_rounded`.
    """
    if x.is_cuda and _fits_a_program(x.shape[-1], group):
        from piecegraph.passes.kernels.norm.rms_norm import add_rms_norm_rounded_on_gpu

        return add_rms_norm_rounded_on_gpu(x, residual, weight, eps, offset, _length(x, group), stored)
    normed, total = add_rms_norm(x, residual, weight, eps, offset)
    return (*round_rows(normed, group, stored), total)


def all_reduce_add_rms_norm_rounded(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `add_rms_norm_rounded(all_reduce(x), *others)`; `x` is overwritten. The bits are those of the separate
    ops."""
    return add_rms_norm_rounded(summed(x), *others)


def _length(x: torch.Tensor, group: int) -> int:
    return x.shape[-1] if group == WHOLE_TOKEN else group


def _fits_a_program(size: int, group: int) -> bool:
    """Return whether a program, which has a row, finds all numbers of a group in it: others take a second kernel."""
    return group == WHOLE_TOKEN or group >= size or group & (group - 1) == 0


RMS_NORM_ROUNDED = define_op(
    "rms_norm_rounded(Tensor x, Tensor? weight, float eps, float offset, int group, ScalarType stored) -> "
    "(Tensor, Tensor)",
    rms_norm_rounded,
    lambda x, weight, eps, offset, group, stored: rounded_like(x, x.shape[-1], group, stored),
)


def _fake(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group, stored = others[-2:]
    return (*rounded_like(x, x.shape[-1], group, stored), x.new_empty(x.shape))


_OF_SUMS = (
    "Tensor residual, Tensor? weight, float eps, float offset, int group, ScalarType stored) -> "
    "(Tensor, Tensor, Tensor)"
)

ADD_RMS_NORM_ROUNDED = define_op(f"add_rms_norm_rounded(Tensor x, {_OF_SUMS}", add_rms_norm_rounded, _fake)

ALL_REDUCE_ADD_RMS_NORM_ROUNDED = define_op(
    f"all_reduce_add_rms_norm_rounded(Tensor(a!) x, {_OF_SUMS}", all_reduce_add_rms_norm_rounded, _fake
)

WITHOUT_SUM: Mapping[Any, OpOverload] = {
    ALL_REDUCE_ADD_RMS_NORM: ADD_RMS_NORM,
    ALL_REDUCE_ADD_NORM_LINEAR: ADD_NORM_LINEAR,
    ALL_REDUCE_ADD_RMS_NORM_ROUNDED: ADD_RMS_NORM_ROUNDED,
}
"""The ops that start with a sum over the ranks, each with the op of the same arguments that does the rest."""
