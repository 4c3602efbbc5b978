"""Waiting, inside a loop, for what the kernel ahead computes."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.own_kernel import own_kernel


@own_kernel
@triton.jit
def wait_for_kernel_ahead():  # type: ignore[no-untyped-def]  # compiled by Triton
    """`gdc_wait` for the first turn of a loop. The first tiles of a loop are asked for before its first turn, and so
    before this wait: what they read must not be the kernel ahead's to write. Triton's own would keep its pipeliner
    from the loop, in 3.9."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
