"""Attention of one query of each request on a CPU, which reads keys and values where they lie in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from piecegraph.passes.kernels.common.cpp_kernel import FLOAT, INT, NUMBER, POINTER, CppKernel

KERNEL = CppKernel(
    Path(__file__).with_name("decode_attention.cpp"),
    "piecegraph_decode_attention",
    [INT, *[POINTER, NUMBER] * 3, *[POINTER] * 6, *[NUMBER] * 7, FLOAT, INT],
)

DTYPES = (torch.float32, torch.bfloat16)

MAX_VALUE_DIM = 1024
"""The most numbers of a value: a thread adds them up on its stack."""


class BoundAttention(NamedTuple):
    """The kernel's arguments that are the same in every step over the same tensors."""

    rows: tuple[Any, ...]  # query, key, value, and how their rows lie
    cache: tuple[int, int]
    out: int
    sizes: tuple[Any, ...]

    def run(self, write_slots: torch.Tensor, slots: torch.Tensor, num_keys: torch.Tensor) -> None:
        """Write keys and values to the cache, and then the attention of each query to `out`.

        `write_slots` `[num_reqs]` and `slots` `[num_reqs, max_keys]` are int64 and contiguous. `num_keys` `[num_reqs]`
        int32, 1 or more, says how many of its slots a request has. Only the first `num_reqs` rows are read and written.
        Sums are in float32; the numbers of a request depend on no other one. Raises `MemoryError`.
        """
        assert write_slots.dtype is slots.dtype is torch.int64 and num_keys.dtype is torch.int32, "as the kernel reads"
        num_reqs, max_keys = slots.shape
        failed = KERNEL.run(
            *self.rows, write_slots.data_ptr(), *self.cache, slots.data_ptr(), num_keys.data_ptr(), self.out, num_reqs,
            max_keys, *self.sizes,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for attention of {num_reqs} requests over {max_keys} keys each")


def bind_attention(
    query: torch.Tensor,  # [num_rows, num_q_heads, key_dim]
    key: torch.Tensor,  # [num_rows, num_kv_heads, key_dim]
    value: torch.Tensor | None,  # [num_rows, num_kv_heads, value_dim]; None: `values` is `keys`
    keys: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, key_dim]; `key` is written to its slots
    values: torch.Tensor,  # the same with value_dim numbers, or `keys`, whose first value_dim numbers are the values
    out: torch.Tensor,  # [num_rows, num_q_heads, value_dim]; written
    scale: float,
) -> BoundAttention | None:
    """Return the kernel's arguments for these tensors, or None where it is not loaded or does not read such tensors.

    All floats need one of `DTYPES`, `out` and the cache contiguous memory, and rows of `query`, `key` and `value`
    contiguous heads. The caller keeps the tensors alive.
    """
    dtype, value_dim = query.dtype, out.shape[2]
    if KERNEL.call is None or dtype not in DTYPES or value_dim > MAX_VALUE_DIM or query.device.type != "cpu":
        return None
    if not (dtype is keys.dtype is values.dtype is key.dtype is out.dtype and (value is None or value.dtype is dtype)):
        return None
    if not (out.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        return None
    if not (_has_dense_rows(query) and _has_dense_rows(key) and (value is None or _has_dense_rows(value))):
        return None
    _, num_q_heads, key_dim = query.shape
    num_kv_heads = keys.shape[2]
    return BoundAttention(
        rows=(
            dtype is torch.bfloat16, query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0),
            None if value is None else value.data_ptr(), 0 if value is None else value.stride(0),
        ),
        cache=(keys.data_ptr(), values.data_ptr()),
        out=out.data_ptr(),
        sizes=(
            num_kv_heads, num_q_heads // num_kv_heads, key_dim, value_dim, values.shape[3], scale,
            torch.get_num_threads(),
        ),
    )  # fmt: skip


def _has_dense_rows(rows: torch.Tensor) -> bool:
    """Return whether the heads of each row, `[num_rows, heads, dim]`, follow one another."""
    return rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
