"""The op `piecegraph::take_rows`: the same rows of several tensors, by their indices; of one tensor, an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecegraph.passes.kernels.common.rows import taken_shape
from piecegraph.passes.ops.library import define_op


def take_rows(sources: Sequence[torch.Tensor], index: torch.Tensor, dim: int, wraps: bool) -> list[torch.Tensor]:
    """Return `source[:, ..., index]` of each source, where `index` counts in dim `dim`, and all dims before `dim` have
    size 1.

    `index` is int64 or int32 of any shape; sources may differ in dtype and in sizes after `dim`, and have any strides.
    With `wraps` a negative number counts from the end, as in an index; without it a negative number is out of range, as
    in an embedding. Results are new and contiguous, of a source's shape with `index.shape` in the place of `dim`. A
    number out of range raises on a CPU; on a GPU its row is NaN, or 0 where the dtype has no NaN, and nothing outside
    the source is read.
    """
    if index.is_cuda:
        from piecegraph.passes.kernels.elementwise.take_rows import take_rows_on_gpu

        return take_rows_on_gpu(sources, index, dim, wraps)
    return take_rows_reference(sources, index, dim, wraps)


def take_rows_reference(
    sources: Sequence[torch.Tensor], index: torch.Tensor, dim: int, wraps: bool
) -> list[torch.Tensor]:
    """Return what the kernel computes, in plain torch."""
    if not wraps:  # raises for a negative number
        numbers = index.reshape(-1)
        return [torch.index_select(each, dim, numbers).reshape(taken_shape(each, index, dim)) for each in sources]
    at: tuple[Any, ...] = (*[slice(None)] * dim, index)
    return [source[at].contiguous() for source in sources]


TAKE_ROWS = define_op(
    "take_rows(Tensor[] sources, Tensor index, int dim, bool wraps) -> Tensor[]",
    take_rows,
    lambda sources, index, dim, wraps: [source.new_empty(taken_shape(source, index, dim)) for source in sources],
)
