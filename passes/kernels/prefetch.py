"""Asking for memory ahead of its use."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.own_kernel import own_kernel


@own_kernel
@triton.jit
def prefetch(addresses):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Ask for the lines at these addresses to be brought to L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\n\tmov.u32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
