"""Attention within sequences through torch's `scaled_dot_product_attention`, on any device.

Adjacent sequences of equal length are one call over dense tensors, which are views: nothing is padded or copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from piecegraph.runner.attention.interface.op_call import position_bias
from piecegraph.runner.attention.varlen.call import EqualSequences, VarlenCall, VarlenMetadata


class SdpaVarlen:
    """The implementation over torch's `scaled_dot_product_attention`."""

    def forward(self, call: VarlenCall, metadata: VarlenMetadata) -> None:
        """Run one layer as `VarlenAttention.forward` does."""
        for group in metadata.equal:
            rows = slice(group.first_row, group.last_row)
            query, key, value = (
                each[rows].unflatten(0, (group.num_seqs, group.seq_len)).transpose(1, 2)
                for each in (call.query, call.key, call.value)
            )
            attended = _attend(query, key, value, call, _mask(call, group))
            call.out[rows].copy_(attended.transpose(1, 2).flatten(0, 1))
        call.out[metadata.num_real_rows :].zero_()


def _mask(call: VarlenCall, group: EqualSequences) -> torch.Tensor | None:
    """Return which keys each query sees, `[seq_len, seq_len]`; None: all, or those before it if the call is causal."""
    if not call.window or call.window >= group.seq_len:
        return None
    places = torch.arange(group.seq_len, device=call.query.device)
    distance = places[:, None] - places[None, :]  # from key to query
    visible = distance.abs() < call.window
    return visible & (distance >= 0) if call.is_causal else visible


def _attend(
    query: torch.Tensor,  # [num_seqs, num_q_heads, seq_len, key_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    call: VarlenCall,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    is_causal = call.is_causal and mask is None
    if not call.softcap and call.sinks is None and call.slopes is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=call.scale, enable_gqa=groups > 1
        )
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.slopes is not None:
        places = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores + position_bias(call.slopes, call.slope_scale, places[None]).unsqueeze(2)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if call.sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    # A sink is one more key whose value is zero: it only takes weight away.
    sink_scores = call.sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    weights = torch.cat([scores, sink_scores], dim=-1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
