"""Norm and rotary embedding of heads as a kernel loads them (`Rotary` defines what is computed)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.attention.interface.rotary import Rotary


def rotary_tensors(rotary: Rotary | None, key_dim: int) -> dict[str, Any]:
    """Return the arguments of a kernel that norms and rotates heads of `key_dim`, without the constants."""
    if rotary is None:
        names = ("cos", "sin", "q_norm_weight", "k_norm_weight")
        return {**dict.fromkeys(names), "norm_eps": 0.0, "norm_offset": 0.0, "cos_stride": 0, "sin_stride": 0}
    assert 0 < rotary.dim <= key_dim and rotary.dim % 2 == 0, (rotary.dim, key_dim)
    assert rotary.sin.shape[1] == rotary.dim and rotary.cos.stride(1) == rotary.sin.stride(1) == 1
    for weight in (rotary.q_norm_weight, rotary.k_norm_weight):
        assert weight is None or (weight.shape == (key_dim,) and weight.stride(0) == 1), weight.shape
    return {
        "cos": rotary.cos,
        "sin": rotary.sin,
        "q_norm_weight": rotary.q_norm_weight,
        "k_norm_weight": rotary.k_norm_weight,
        "norm_eps": float(rotary.norm_eps or 0.0),
        "norm_offset": float(rotary.norm_offset),
        "cos_stride": rotary.cos.stride(0),
        "sin_stride": rotary.sin.stride(0),
    }


def rotary_constants(rotary: Rotary | None) -> dict[str, Any]:
    """Return the constants that such a kernel is compiled for; a `ROTARY_DIM` of 0 means that nothing is rotated."""
    return {
        "ROTARY_DIM": 0 if rotary is None else rotary.dim,
        "HAS_NORM": rotary is not None and rotary.norm_eps is not None,
    }


@own_kernel
@triton.jit
def load_rotated(  # type: ignore[no-untyped-def]  # compiled by Triton
    heads,  # [ROWS, 1] pointers to the first number of a head
    is_head,  # [ROWS, 1]; the others are not read, and are 0
    cos,  # pointers to the first number of a token's table: [ROWS, 1], or one for all rows
    sin,
    weight,  # [DIM], pointers [ROWS, 1] to it, or None
    eps,
    offset,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # DIM, padded to a power of two
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Load heads `[ROWS, BLOCK]` float32, normed and rotated."""
    c, s = load_tables(cos, sin, is_head, BLOCK, ROTARY_DIM)
    return load_and_rotate(heads, is_head, c, s, weight, eps, offset, DIM, BLOCK, ROTARY_DIM, HAS_NORM)


@own_kernel
@triton.jit
def load_tables(cos, sin, is_row, BLOCK: tl.constexpr, ROTARY_DIM: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Load the factors of a head's numbers and those of their partners: `[ROWS, BLOCK]` each, in the tables' dtype.

    Each row is loaded separately, though rows may share one table: a row that all share gets another layout, to which
    Triton then converts the whole tile, through shared memory and dozens of barriers.
    """
    at = tl.arange(0, BLOCK)[None, :]
    c = tl.load(cos + at, mask=is_row & (at < ROTARY_DIM), other=1.0)
    s = tl.load(sin + at, mask=is_row & (at < ROTARY_DIM), other=0.0)
    return c, tl.where(at < ROTARY_DIM // 2, -s, s)


@own_kernel
@triton.jit
def load_and_rotate(  # type: ignore[no-untyped-def]  # compiled by Triton
    heads,
    is_head,
    c,  # from `load_tables`
    s,
    weight,
    eps,
    offset,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Load heads as `load_rotated` does, with tables that are loaded already."""
    x, other, factor, other_factor = load_unrotated(heads, is_head, weight, offset, DIM, BLOCK, ROTARY_DIM, HAS_NORM)
    return rotate(x, other, factor, other_factor, c, s, eps, DIM, HAS_NORM)


@own_kernel
@triton.jit
def load_unrotated(  # type: ignore[no-untyped-def]  # compiled by Triton
    heads,
    is_head,
    weight,
    offset,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Load heads as they are, each number's partner, and the norm's factors of both, without waiting for a load.

    Partners are loaded as well: they are in L1 by then, and swapping halves between threads would go through shared
    memory.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    number = tl.arange(0, BLOCK)
    partner = tl.where(number < HALF, number + HALF, number - HALF)
    if HALF % 8 == 0:  # Triton does not see that eight of these are adjacent, and would load them one by one
        partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
    at = number[None, :]
    partner_at = partner[None, :]
    is_rotary = at < ROTARY_DIM
    x = tl.load(heads + at, mask=is_head & (at < DIM), other=0.0)
    other = tl.load(heads + partner_at, mask=is_head & is_rotary, other=0.0)
    factor = tl.full([1, 1], 1.0, tl.float32)
    other_factor = factor
    if HAS_NORM:
        if weight is not None:
            factor = tl.load(weight + at, mask=is_head & (at < DIM), other=0.0).to(tl.float32) + offset
            other_factor = tl.load(weight + partner_at, mask=is_head & is_rotary, other=0.0).to(tl.float32) + offset
    return x, other, factor, other_factor


@own_kernel
@triton.jit
def rotate(x, other, factor, other_factor, c, s, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Norm and rotate what `load_unrotated` and `load_tables` returned; the result is float32."""
    x = x.to(tl.float32)
    other = other.to(tl.float32)
    if HAS_NORM:
        shrink = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x = x * shrink * factor
        other = other * shrink * other_factor
    return x * c.to(tl.float32) + other * s.to(tl.float32)
