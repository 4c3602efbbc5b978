"""`piecegraph::take_rows`: the same rows of several tensors, by their numbers; of one, an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecegraph.passes.ops.library import define_op


def take_rows(sources: Sequence[torch.Tensor], index: torch.Tensor, dim: int, wraps: bool) -> list[torch.Tensor]:
    """`source[:, ..., index]` of each, `dim` being the dim that `index` counts in and all dims ahead of it of size 1.

    `index` is int64 or int32 of any shape; sources may differ in dtype and in sizes behind `dim`, and are strided as
    they like. With `wraps` a negative number counts from the end, as in an index; without it there is no such row, as
    in an embedding. Results are new and contiguous, of a source's shape with `index.shape` in the place of `dim`. A
    number outside of a source raises on a CPU; on a GPU its row is NaN, or 0 where the dtype has none, and nothing
    outside is read.
    """
    if index.is_cuda:
        from piecegraph.passes.kernels.take_rows import take_rows_on_gpu

        return take_rows_on_gpu(sources, index, dim, wraps)
    return take_rows_reference(sources, index, dim, wraps)


def take_rows_reference(
    sources: Sequence[torch.Tensor], index: torch.Tensor, dim: int, wraps: bool
) -> list[torch.Tensor]:
    """What the kernel does, in torch."""
    if not wraps:  # raises for a negative number
        numbers = index.reshape(-1)
        return [torch.index_select(each, dim, numbers).reshape(result_shape(each, index, dim)) for each in sources]
    at: tuple[Any, ...] = (*[slice(None)] * dim, index)
    return [source[at].contiguous() for source in sources]


def result_shape(source: torch.Tensor, index: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Of what is taken of one source; sizes may be symbols."""
    return (*source.shape[:dim], *index.shape, *source.shape[dim + 1 :])


TAKE_ROWS = define_op(
    "take_rows(Tensor[] sources, Tensor index, int dim, bool wraps) -> Tensor[]",
    take_rows,
    lambda sources, index, dim, wraps: [source.new_empty(result_shape(source, index, dim)) for source in sources],
)
