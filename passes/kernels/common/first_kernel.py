"""A kernel that does nothing useful; compiling it loads Triton's compiler (`kernel_child.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


@own_kernel
@triton.jit
def first_kernel(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    tl.store(x + tl.arange(0, SIZE), 1.0)
