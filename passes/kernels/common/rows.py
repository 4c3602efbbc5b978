"""A tensor as the rows of its last dim, wherever they lie: slices of a merged projection are read without a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor.

    Row `r` of `num_rows` starts at `(r // inner) * outer_stride + (r % inner) * inner_stride` and has no gaps.
    """

    tensor: torch.Tensor
    num_rows: int
    inner: int
    outer_stride: int
    inner_stride: int


def rows_of(x: torch.Tensor) -> Rows:
    """Return the rows of `x`, or of a contiguous copy if two strides do not address them."""
    size = x.shape[-1]
    if x.is_contiguous():
        return Rows(x, x.numel() // size if size else 0, 1, size, 0)
    dims = _merged(x)
    if x.stride(-1) != 1 or len(dims) > 2:
        return rows_of(x.contiguous())
    (outer, outer_stride), (inner, inner_stride) = ((1, 0), (1, 0), *dims)[-2:]
    if len(dims) == 1:
        return Rows(x, inner, 1, inner_stride, 0)
    return Rows(x, outer * inner, inner, outer_stride, inner_stride)


def evenly_spaced_rows_of(x: torch.Tensor) -> Rows:
    """Return the rows of `x`, or of a copy, with one stride between them: `inner` is 1."""
    rows = rows_of(x)
    return rows if rows.inner == 1 else rows_of(x.contiguous())


def taken_shape(source: torch.Tensor, index: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Return the shape of `source` indexed by `index` in dim `dim`. Sizes may be symbols."""
    return (*source.shape[:dim], *index.shape, *source.shape[dim + 1 :])


def _merged(x: torch.Tensor) -> list[tuple[int, int]]:
    """Return (size, stride) of the dims before the last, merged into as few as address the same rows in order."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged
