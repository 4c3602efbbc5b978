"""The kernel in C++ for rows of floats and int8 weights on a CPU, and how it is called.

Where it is not there, `piecegraph::int8_linear` calls torch's kernels.
"""

from __future__ import annotations

from pathlib import Path

import torch

from piecegraph.passes.kernels.common.cpp_kernel import INT, NUMBER, POINTER, CppKernel

MAX_BFLOAT16_ROWS = 64
"""The most rows of bfloat16 that the kernel multiplies: more rows pay for a copy of the weights in bfloat16, in which
the rows are. A row of float32 would lose by such a product, so that all of them are multiplied here.

Measured on two cores of an Intel Xeon with AMX: docs/quantization.md has the figures."""

MAX_SIZE = 65_536
"""The largest size of a row whose sums, of 255 * 128 * size at most, fit 32 bits."""

KERNEL = CppKernel(
    Path(__file__).with_name("int8_linear.cpp"),
    "piecegraph_int8_linear",
    [POINTER, NUMBER, *[POINTER] * 4, *[NUMBER] * 3, INT, INT],
    instructions=("avx512_vnni", "avx512bw", "avx512vl"),
    probe="piecegraph_has_vnni",
)


def int8_rows(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Return what `int8_linear` does, or None for what the kernel does not compute, or nobody does.

    It computes float32, and bfloat16 up to `MAX_BFLOAT16_ROWS` rows, both up to `MAX_SIZE` columns of `x`, once it is
    there. It reads contiguous weights, scales and biases of `int8_linear`'s shapes and dtypes.
    """
    num_columns, size = weight.shape
    num_rows = x.numel() // size if size else 0
    if KERNEL.call is None or num_rows == 0 or size > MAX_SIZE or not num_columns:
        return None
    dtype = x.dtype
    if dtype is torch.bfloat16 and num_rows > MAX_BFLOAT16_ROWS:
        return None
    if dtype is not scale.dtype or dtype not in (torch.float32, torch.bfloat16) or x.shape[-1] != size:
        return None
    if not (weight.is_contiguous() and scale.is_contiguous() and scale.shape[0] == num_columns):
        return None
    if bias is not None and not (bias.dtype is dtype and bias.is_contiguous() and bias.shape[0] == num_columns):
        return None
    rows = x if x.is_contiguous() else x.contiguous()
    out = rows.new_empty((*x.shape[:-1], num_columns))
    has_no_memory = KERNEL.run(
        rows.data_ptr(),
        size,
        weight.data_ptr(),
        scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        num_columns,
        size,
        dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if has_no_memory:
        raise MemoryError(f"no memory for {num_rows} rows of {size} bytes, twice")
    return out
