"""The scales of cached keys and values, calibrated once: heads are measured while the model runs over fixed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.attention.interface.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.attention.interface.kv_cache import KVCache, allocate_kv_caches
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall, position_bias
from piecegraph.runner.attention.triton.reference import attend, rotated

NUM_TOKENS = 512
"""The number of tokens that a model is calibrated on, or all that it takes."""

KEY_RANGE, VALUE_RANGE = 200.0, 100.0
"""The values that a head's largest key and value are scaled to, as in vLLM; e4m3 reaches 448, so more fits."""


class _Measuring:
    """Attention over one text without a cache, which keeps the largest key and value of each head of each layer."""

    def __init__(self) -> None:
        self.largest: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # each [num_kv_heads] float32

    def forward(self, call: AttentionCall, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Write the attention of all rows, which are one text, into `call.out`."""
        query, key, value = call.query, call.key, call.value
        if call.rotary is not None:
            query, key = rotated(query, key, call.rotary)
        of_key, of_value = (each.float().abs().amax(dim=(0, 2)) for each in (key, value))
        self.largest[call.layer] = of_key, of_value
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
) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the scales of keys and of values by the layer's name, each `[num_kv_heads]` float32 above 0.

    `forward`: `(input_ids, positions, logits_indices)`, the model with our attention and without other layers that keep
    something. It runs once, over `NUM_TOKENS` fixed tokens, so that every start gives the same scales. A head that was
    zero throughout gets 1. Raises `CheckpointError` for numbers that are not finite.
    """
    num_tokens = min(NUM_TOKENS, max_model_len)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocab_size, (num_tokens,), generator=generator).to(device)
    positions = torch.arange(num_tokens, device=device)
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
        slot_mapping=positions,
        host=None,
    )
    caches = allocate_kv_caches(layers, 1, 1, device)
    with set_forward_context(ForwardContext(impl=measuring, metadata=metadata, kv_caches=caches)):
        forward(input_ids, positions, positions[-1:])
    return {layer.name: _scales(layer, *measuring.largest[layer.name]) for layer in layers}


def _scales(layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of a layer by the largest key and value of each head."""
    if not bool(key.isfinite().all() and value.isfinite().all()):
        raise CheckpointError(
            f"keys or values of {layer.name} are infinite or not numbers over the fixed tokens of a calibration; check "
            "the weights, or leave calculate_kv_scales out."
        )
    if layer.is_latent:  # values are a part of keys, and have their scale
        value = key * (VALUE_RANGE / KEY_RANGE)
    of_key, of_value = key / KEY_RANGE, value / VALUE_RANGE
    return torch.where(of_key > 0, of_key, 1.0), torch.where(of_value > 0, of_value, 1.0)
