"""The ops of layers with states: their schemas, and the tensors that each keeps.

`layer` is the only argument in which equal layers differ, and stays the last, as in the ops of attention. Rows of the
inputs are tokens. Each op writes its result into `out`, a buffer of the caller's, and the layer's states into the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecegraph.runner.attention.interface.cache_spec import CacheTensor
from piecegraph.runner.state_layers.libraries.choice import Rule, ScanKind

LINEAR_ATTENTION_OP = "piecegraph::linear_attention"
MAMBA_MIXER_OP = "piecegraph::mamba_mixer"
SHORT_CONV_OP = "piecegraph::short_conv"

LINEAR_ATTENTION_SCHEMA = (
    "linear_attention(Tensor mixed, Tensor decay, Tensor beta, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) out, "
    "int num_k_heads, int head_k_dim, float scale, str layer) -> ()"
)
MAMBA_MIXER_SCHEMA = (
    "mamba_mixer(Tensor mixed, Tensor dt, Tensor A, Tensor D, Tensor? conv_weight, Tensor? conv_bias, Tensor(a!) out, "
    "int num_groups, int state_size, str layer) -> ()"
)
SHORT_CONV_SCHEMA = (
    "short_conv(Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor(a!) out, str layer) -> ()"
)


def conv_state(x: Any, weight: Any) -> CacheTensor:
    """Return the last inputs of a causal convolution: `weight` is `[channels, kernel_size]`, `x` has its dtype."""
    channels, kernel_size = weight.shape
    return CacheTensor(name="conv", shape=(channels, kernel_size - 1), dtype=x.dtype)


def linear_attention_states(
    mixed: Any, decay: Any, beta: Any, conv_weight: Any, conv_bias: Any, out: Any, num_k_heads: int, head_k_dim: int,
    scale: float, layer: str,
) -> tuple[CacheTensor, ...]:  # fmt: skip
    """Return what a layer of linear attention keeps."""
    _, num_v_heads, head_v_dim = out.shape
    recurrent = CacheTensor(name="recurrent", shape=(num_v_heads, head_k_dim, head_v_dim), dtype=torch.float32)
    return conv_state(mixed, conv_weight), recurrent


def mamba_mixer_states(
    mixed: Any, dt: Any, A: Any, D: Any, conv_weight: Any, conv_bias: Any, out: Any, num_groups: int, state_size: int,  # noqa: N803
    layer: str,
) -> tuple[CacheTensor, ...]:  # fmt: skip
    """Return what a state-space layer keeps; a layer whose convolution is a call of its own keeps no window."""
    _, num_heads, head_dim = out.shape
    recurrent = CacheTensor(name="recurrent", shape=(num_heads, head_dim, state_size), dtype=torch.float32)
    return (recurrent,) if conv_weight is None else (conv_state(mixed, conv_weight), recurrent)


def short_conv_states(
    x: Any, weight: Any, bias: Any, activation: str | None, out: Any, layer: str
) -> tuple[CacheTensor, ...]:
    """Return what a convolution keeps."""
    return (conv_state(x, weight),)


STATE_OPS: Mapping[str, Callable[..., tuple[CacheTensor, ...]]] = {
    LINEAR_ATTENTION_OP: linear_attention_states,
    MAMBA_MIXER_OP: mamba_mixer_states,
    SHORT_CONV_OP: short_conv_states,
}
"""By op, the function from the arguments of a call (a `TensorSpec` for each tensor) to what the layer keeps."""


def scan_kind(op: str, args: Sequence[Any]) -> ScanKind | None:
    """Return what a call of an op computes besides its convolution (a `TensorSpec` for each tensor), or None."""
    if op == LINEAR_ATTENTION_OP:
        mixed, decay, head_k_dim = args[0], args[1], args[7]
        rule = Rule.DELTA_BY_CHANNEL if len(decay.shape) == 3 else Rule.DELTA
        return ScanKind(rule=rule, dtype=mixed.dtype, key_dim=head_k_dim)
    if op == MAMBA_MIXER_OP:
        mixed, rates, state_size = args[0], args[2], args[8]
        rule = Rule.MAMBA if len(rates.shape) == 2 else Rule.MAMBA2
        return ScanKind(rule=rule, dtype=mixed.dtype, key_dim=state_size)
    return None
