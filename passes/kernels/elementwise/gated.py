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
