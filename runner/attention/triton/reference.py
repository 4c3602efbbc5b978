"""The kernels' computation in plain torch: the reference they are tested against, and the code that runs on a CPU.

Everything about the batch is read from its tensors when the call is made, so the same call fits any
batch that is put into them.
"""

from __future__ import annotations

import torch

from piecegraph.passes.ops.quantised.rounded_rows import MAX_E4M3
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.op_call import AttentionCall, position_bias
from piecegraph.runner.attention.interface.rotary import Rotary


def rotated(
    query: torch.Tensor,  # [num_tokens, num_q_heads, key_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, key_dim]
    rotary: Rotary,
    rows: slice = slice(None),  # of the tables: those that `query` and `key` are of
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key normed and rotated, as new tensors of their dtypes."""
    cos, sin = rotary.cos[rows], rotary.sin[rows]
    return (
        _rotated(query, cos, sin, rotary.q_norm_weight, rotary.norm_eps, rotary.norm_offset),
        _rotated(key, cos, sin, rotary.k_norm_weight, rotary.norm_eps, rotary.norm_offset),
    )


def _rotated(
    x: torch.Tensor,  # [num_tokens, num_heads, dim]
    cos: torch.Tensor,  # [num_tokens, rotary_dim]
    sin: torch.Tensor,
    weight: torch.Tensor | None,  # [dim]
    eps: float | None,
    offset: float,
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            wide = wide * (weight.to(wide.dtype) + offset)
    turned, kept = wide[..., : cos.shape[1]], wide[..., cos.shape[1] :]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = cos.to(wide.dtype).unsqueeze(1), sin.to(wide.dtype).unsqueeze(1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, kept], dim=-1).to(x.dtype)


def write_kv(key: torch.Tensor, value: torch.Tensor, *, kv_cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Write `key` and `value` `[num_tokens, num_kv_heads, dim]` to the slots that are not negative.

    Each number is divided by the factor that the cache has for its head, a key less the shift of its head.
    """
    block_size = kv_cache.key.shape[1]
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    scales = kv_cache.scales
    of_key, of_value = (None, None) if scales is None else (scales.key, scales.value)
    if scales is not None and scales.key_shift is not None:
        key = key.float() - scales.key_shift
    # Of latents, the second is part of the first.
    for new, cached, scale in ((key, kv_cache.key, of_key), (value, kv_cache.value, of_value)):
        numbers = new[rows] if scale is None else new[rows].float() / scale[:, None]
        if cached.dtype is torch.float8_e4m3fn:  # torch indexes no e4m3
            numbers = numbers.clamp(-MAX_E4M3, MAX_E4M3).to(cached.dtype).view(torch.uint8)
            cached = cached.view(torch.uint8)
        cached[slots // block_size, slots % block_size] = numbers.to(cached.dtype)


def paged_attention(
    call: AttentionCall,
    kv_cache: KVCache,
    *,
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    seq_lens: torch.Tensor,  # [num_reqs] int32
    block_table: torch.Tensor,  # [num_reqs, max_blocks] int32
) -> None:
    """Compute causal attention over the cache, which holds the new tokens too, in float32.

    Writes `call.out`, but for rows that no request owns. `call.query` is rotated already; `call.key`, `call.value` and
    `call.rotary` are not read.
    """
    query, out, window, chunk_size = call.query, call.out, call.window, call.chunk_size
    block_size = kv_cache.key.shape[1]
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, stop = starts[request], starts[request + 1]
        if start == stop:
            continue
        positions = torch.arange(seq_len - (stop - start), seq_len, device=query.device)
        first = max(0, seq_len - (stop - start) - window + 1) if window else 0
        if chunk_size:
            first = (seq_len - (stop - start)) // chunk_size * chunk_size
        key_positions = torch.arange(first, seq_len, device=query.device)
        blocks = block_table[request].index_select(0, key_positions // block_size).long()
        key, value = (_taken(cached, blocks, key_positions % block_size) for cached in (kv_cache.key, kv_cache.value))
        if (scales := kv_cache.scales) is not None:
            key, value = key.float() * scales.key[:, None], value.float() * scales.value[:, None]
        visible = key_positions <= positions[:, None]
        if window:
            visible &= key_positions > positions[:, None] - window
        if chunk_size:
            visible &= key_positions >= positions[:, None] // chunk_size * chunk_size
        bias = None if call.slopes is None else position_bias(call.slopes, call.slope_scale, key_positions)
        attended = attend(
            query[start:stop], key, value, visible, scale=call.scale, softcap=call.softcap, sinks=call.sinks, bias=bias
        )
        out[start:stop] = attended.to(out.dtype)


def _taken(cached: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the keys or values of these tokens of these blocks; those in e4m3 as bfloat16, which holds them."""
    if cached.dtype is torch.float8_e4m3fn:
        return cached.view(torch.uint8)[blocks, tokens].view(cached.dtype).to(torch.bfloat16)
    return cached[blocks, tokens]


def attend(
    query: torch.Tensor,  # [query_len, num_q_heads, key_dim]
    key: torch.Tensor,  # [num_keys, num_kv_heads, key_dim]
    value: torch.Tensor,  # [num_keys, num_kv_heads, value_dim]
    visible: torch.Tensor,  # [query_len, num_keys] bool
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,  # [num_q_heads, num_keys] float32
) -> torch.Tensor:
    """Return the attention of one request: `[query_len, num_q_heads, value_dim]` float32."""
    num_kv_heads = key.shape[1]
    grouped = query.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv heads, group, queries, dim]
    scores = grouped @ key.float().permute(1, 2, 0).unsqueeze(1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.unflatten(0, (num_kv_heads, -1)).unsqueeze(2)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:  # one more key, whose value is zero
        sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    attended = weights @ value.float().transpose(0, 1).unsqueeze(1)  # [kv heads, group, queries, value_dim]
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
