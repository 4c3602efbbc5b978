"""Attention of one query of each request on a CPU, which reads keys and values where they lie in the cache."""

from __future__ import annotations

from pathlib import Path

import torch

from piecegraph.passes.kernels.common.cpp_kernel import FLOAT, INT, NUMBER, POINTER, CppKernel

KERNEL = CppKernel(
    Path(__file__).with_name("decode_attention.cpp"),
    "piecegraph_decode_attention",
    [INT, POINTER, POINTER, NUMBER, POINTER, NUMBER, *[POINTER] * 6, *[NUMBER] * 7, FLOAT, INT],
)

DTYPES = (torch.float32, torch.bfloat16)

MAX_VALUE_DIM = 1024
"""The most numbers of a value: a thread adds them up on its stack."""


def decode_attention(
    query: torch.Tensor,  # [num_reqs, num_q_heads, key_dim]
    key: torch.Tensor,  # [num_reqs, num_kv_heads, key_dim]
    value: torch.Tensor | None,  # [num_reqs, num_kv_heads, value_dim]; None: `values` is `keys`
    write_slots: torch.Tensor,  # [num_reqs] int64
    keys: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, key_dim]; `key` is written to its slots
    values: torch.Tensor,  # the same with value_dim numbers, or `keys`, whose first value_dim numbers are the values
    slots: torch.Tensor,  # [num_reqs, max_keys] int64, contiguous
    num_keys: torch.Tensor,  # [num_reqs] int32, 1 or more: how many of its slots a request has
    out: torch.Tensor,  # [num_reqs, num_q_heads, value_dim]; written
    scale: float,
) -> bool:
    """Write keys and values to the cache and the attention of each query to `out`, unless the kernel cannot.

    Return whether it did. All floats need one of `DTYPES`, `query`, `out` and the cache contiguous memory, and
    rows of `key` and `value` contiguous heads. Sums are in float32; the numbers of a request depend on no other one.
    """
    dtype, value_dim = query.dtype, out.shape[2]
    if KERNEL.call is None or dtype not in DTYPES or value_dim > MAX_VALUE_DIM or query.device.type != "cpu":
        return False
    if not (dtype is keys.dtype is values.dtype is key.dtype is out.dtype and (value is None or value.dtype is dtype)):
        return False
    is_dense = query.is_contiguous() and out.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    if not is_dense or not _has_dense_rows(key) or (value is not None and not _has_dense_rows(value)):
        return False
    assert write_slots.dtype is slots.dtype is torch.int64 and num_keys.dtype is torch.int32, "as the kernel reads them"
    num_reqs, num_q_heads, key_dim = query.shape
    num_kv_heads = keys.shape[2]
    failed = KERNEL.call(
        dtype is torch.bfloat16, query.data_ptr(), key.data_ptr(), key.stride(0),
        None if value is None else value.data_ptr(), 0 if value is None else value.stride(0), write_slots.data_ptr(),
        keys.data_ptr(), values.data_ptr(), slots.data_ptr(), num_keys.data_ptr(), out.data_ptr(), num_reqs,
        slots.shape[1], num_kv_heads, num_q_heads // num_kv_heads, key_dim, value_dim, values.shape[3], scale,
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for attention of {num_reqs} requests over {slots.shape[1]} keys each")
    return True


def _has_dense_rows(rows: torch.Tensor) -> bool:
    """Return whether the heads of each row, `[num_rows, heads, dim]`, follow one another."""
    return rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
