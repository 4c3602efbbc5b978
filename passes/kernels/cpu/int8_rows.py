"""The kernel in C++ for a few rows of floats and int8 weights on a CPU: when it is there, and how it is called.

Its source is `int8_linear.cpp`, its library what the compiler's rooms build or load at the start of a model
(`compiler/own_kernels/cpp_library.py`), which give it to `use`. The choice is one of the process, because an op takes
tensors only. Until then, and where there is no library, `piecegraph::int8_linear` calls torch's kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("int8_linear.cpp")

MAX_ROWS = 32
"""The most rows that the kernel multiplies: more rows pay for a copy of the weights in bfloat16.

Measured on two cores of an Intel Xeon with AMX: docs/quantization.md has the figures."""

MAX_SIZE = 65_536
"""The largest size of a row whose sums are certain to fit 32 bits."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: list[Any] = [_POINTER, _NUMBER, *[_POINTER] * 4, *[_NUMBER] * 3, ctypes.c_int, ctypes.c_int]

Kernel = Callable[..., int]

_kernel: Kernel | None = None
_why_not = "it was not loaded"


def kernel_of(library: ctypes.CDLL) -> Kernel:
    """Return the function of `library`. Raises `AttributeError` for a library of something else."""
    kernel = library.piecegraph_int8_linear
    kernel.argtypes, kernel.restype = _ARGUMENTS, ctypes.c_int
    return kernel


def use(library: ctypes.CDLL) -> None:
    """Multiply by the kernel of `library` from now on. Raises `AttributeError` for a library of something else."""
    global _kernel, _why_not
    if not library.piecegraph_has_vnni():
        do_without("the C++ compiler has no AVX512-VNNI")
        return
    _kernel, _why_not = kernel_of(library), ""


def do_without(why: str) -> None:
    """Multiply by torch's kernels from now on; `why` is for `why_not`."""
    global _kernel, _why_not
    _kernel, _why_not = None, why


def why_not() -> str:
    """Return why torch's kernels multiply, or "" where ours does."""
    return _why_not


def int8_rows(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Return what `int8_linear` does, or None for what the kernel does not compute.

    It computes float32 and bfloat16, up to `MAX_ROWS` rows and `MAX_SIZE` columns of `x`, once it is there.
    """
    num_columns, size = weight.shape
    num_rows = x.numel() // size if size else 0
    if _kernel is None or not 0 < num_rows <= MAX_ROWS or size > MAX_SIZE or not num_columns:
        return None
    dtype = x.dtype
    if dtype is not scale.dtype or dtype not in (torch.float32, torch.bfloat16):
        return None
    rows = x if x.is_contiguous() else x.contiguous()
    out = rows.new_empty((*x.shape[:-1], num_columns))
    has_no_memory = _kernel(
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
