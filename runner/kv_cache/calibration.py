"""The scales of cached keys and values, calibrated once: heads are measured while the model runs over fixed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from piecegraph.errors import CheckpointError
from piecegraph.passes.ops.quantised.rounded_rows import MAX_E4M3
from piecegraph.runner.attention.interface.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.attention.interface.kv_cache import KVCache, KVScales, allocate_kv_caches
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall, position_bias
from piecegraph.runner.attention.triton.reference import attend, rotated

NUM_TOKENS = 512
"""The number of tokens that a model is calibrated on, or all that it takes."""

NUM_LATER_TOKENS = 128
"""The number of tokens whose keys are measured at later positions, too."""

KEY_RANGE, VALUE_RANGE = 200.0, 100.0
"""The values that a head's largest key and value are scaled to, as in vLLM; e4m3 reaches 448, so that more fits."""

MAX_KEY_TO_REST = 16.0
"""The largest key that a scale is made for, in multiples of the largest key less the constant of its head. The scale of
a larger constant would leave the rest to e4m3's subnormal numbers."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Measurements of a layer's keys over one text, each `[num_kv_heads, key_dim]` float32."""

    first: torch.Tensor
    mean: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor


class _Measuring:
    """Attention over one text without a cache, which keeps what scales are made of, by the layer's name."""

    def __init__(self) -> None:
        self.keys: dict[str, _Keys] = {}
        self.largest_values: dict[str, torch.Tensor] = {}  # [num_kv_heads] float32

    def forward(self, call: AttentionCall, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Write the attention of all rows, which are one text, into `call.out`."""
        query, key, value = call.query, call.key, call.value
        if call.rotary is not None:
            query, key = rotated(query, key, call.rotary)
        numbers = key.float()
        self.keys[call.layer] = _Keys(numbers[0], numbers.mean(dim=0), *numbers.aminmax(dim=0))
        self.largest_values[call.layer] = value.float().abs().amax(dim=(0, 2))
        positions = torch.arange(key.shape[0], device=key.device)
        visible = positions <= positions[:, None]
        if call.window:
            visible &= positions > positions[:, None] - call.window
        if call.chunk_size:
            visible &= positions // call.chunk_size == positions[:, None] // call.chunk_size
        bias = None if call.slopes is None else position_bias(call.slopes, call.slope_scale, positions)
        attended = attend(
            query, key, value, visible, scale=call.scale, softcap=call.softcap, sinks=call.sinks, bias=bias
        )
        call.out.copy_(attended)

    def prepare(self, call: AttentionCall, kv_cache: KVCache) -> str:
        """Return why nothing is prepared."""
        return "a calibration runs once"


@torch.no_grad()
def calibrated_scales(
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
    layers: Sequence[AttentionLayer],
    *,
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
) -> Mapping[str, KVScales]:
    """Return the scales of keys and of values, and what is subtracted from keys, by the layer's name.

    `forward`: `(input_ids, positions, logits_indices)`, the model with our attention and without other layers that keep
    something. It runs over `NUM_TOKENS` fixed tokens, and over the first of them at later positions, so that every
    start gives the same scales. A head that was zero throughout gets 1. Raises `CheckpointError` for numbers that are
    not finite at any of the positions.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocab_size, (min(NUM_TOKENS, max_model_len),), generator=generator).to(device)
    measured = [_measured(forward, layers, input_ids)]
    of_later = input_ids[:NUM_LATER_TOKENS]
    measured += [_measured(forward, layers, of_later, first) for first in later_positions(max_model_len)]
    return {
        layer.name: _scales(
            layer, [each.keys[layer.name] for each in measured], [each.largest_values[layer.name] for each in measured]
        )
        for layer in layers
    }


def later_positions(max_model_len: int) -> list[int]:
    """Return the first positions, after those of the calibration's text, at which keys are measured again."""
    found, position = [], NUM_TOKENS
    while position + NUM_LATER_TOKENS <= max_model_len:
        found.append(position)
        position += position // 2
    return found


def common_part(means: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return of each number the mean that is closest to zero, or zero where means have both signs.

    No mean less that is larger than it was, so that no text's keys become larger on average at any of the positions
    where they were measured. A rotary embedding turns the mean key with its position; what hardly turns is left.
    """
    lowest, highest = torch.stack(list(means)).aminmax(dim=0)
    return lowest.clamp(min=0.0) + highest.clamp(max=0.0)


def _measured(
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
    layers: Sequence[AttentionLayer],
    input_ids: torch.Tensor,
    first_position: int = 0,
) -> _Measuring:
    """Run the model over one text that begins at a position, and return what was measured."""
    num_tokens, device = len(input_ids), input_ids.device
    slots = torch.arange(num_tokens, device=device)
    measuring = _Measuring()
    no_blocks = torch.zeros(1, 1, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        num_reqs=1,
        num_tokens=num_tokens,
        max_query_len=num_tokens,
        num_decode_reqs=0,
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_table=no_blocks,
        slot_mapping=slots,
        host=None,
    )
    caches = allocate_kv_caches(layers, 1, 1, device)
    with set_forward_context(ForwardContext(impl=measuring, metadata=metadata, kv_caches=caches)):
        forward(input_ids, first_position + slots, slots[-1:])
    return measuring


def key_shift(first: torch.Tensor, common: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return what is subtracted from the keys of each head, `[num_kv_heads, key_dim]` float32.

    That is what keys have in common, so that what is rounded is smaller, moved by less than a rounding so that the key
    of a text's first token is kept exactly: most heads attend to it most, and it is the farthest from the others.

    Args:
        first: the key of the first token, `[num_kv_heads, key_dim]` float32.
        common: the common part of other keys, of the same shape.
        scale: by which keys are divided, `[num_kv_heads]` float32.
    """
    kept = ((first - common) / scale[:, None]).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    return first - kept.float() * scale[:, None]


def _scales(layer: AttentionLayer, keys: Sequence[_Keys], values: Sequence[torch.Tensor]) -> KVScales:
    """Return the scales of a layer, and the constant of its keys, by what was measured over each text."""
    lowest = torch.stack([each.lowest for each in keys]).amin(dim=0)
    highest = torch.stack([each.highest for each in keys]).amax(dim=0)
    value = torch.stack(list(values)).amax(dim=0)
    if not bool(lowest.isfinite().all() and highest.isfinite().all() and value.isfinite().all()):
        raise CheckpointError(
            f"keys or values of {layer.name} are infinite or not numbers over the fixed tokens of a calibration, which "
            "runs at positions up to max_model_len; check the weights, lower max_model_len, or leave "
            "calculate_kv_scales out."
        )
    key = largest = torch.maximum(highest, -lowest).amax(dim=-1)
    common = None
    if layer.unshiftable_reason is None:
        common = common_part([each.mean for each in keys])
        rest = torch.maximum(highest - common, common - lowest).amax(dim=-1)
        key = torch.where(rest > 0, largest.minimum(MAX_KEY_TO_REST * rest), largest)
    if layer.is_latent:  # values are a part of keys, and have their scale
        value = key * (VALUE_RANGE / KEY_RANGE)
    of_key, of_value = (torch.where(each > 0, each, 1.0) for each in (key / KEY_RANGE, value / VALUE_RANGE))
    if common is None:
        return KVScales(of_key, of_value)
    return KVScales(of_key, of_value, key_shift(keys[0].first, common, of_key))
