"""Gated activations inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


@own_kernel
@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return `act(gate) * up`, all float32. `ACTIVATION` is a name in `act_mul.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(inner)), and no overflow
    return gate * up


@own_kernel
@triton.jit
def clamped_swiglu(  # type: ignore[no-untyped-def]  # compiled by Triton
    gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):
    """Return `(up + 1) * gate * sigmoid(ALPHA * gate)`, all float32, of a `gate` up to LIMIT and an `up` within it."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + 1.0) * gate * tl.sigmoid(ALPHA * gate)
