"""PTX instructions that kernels call as functions."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


@own_kernel
@triton.jit
def prefetch(addresses):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Ask for the cache lines at `addresses` to be brought to L2, and wait for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\n\tmov.u32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@own_kernel
@triton.jit
def wait_for_preceding_kernel():  # type: ignore[no-untyped-def]  # compiled by Triton
    """Wait until the preceding kernel's results are there, in the first iteration of a loop.

    The first tiles of a loop are loaded before its first iteration, and so before this wait: the preceding kernel must
    not write what they read. Triton's own `gdc_wait` would keep its pipeliner (3.9) from the loop.
    """
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
