"""Draws a token a row, or takes the likeliest one, straight from logits."""

from __future__ import annotations

import torch

from piecegraph.runner.sampling.gumbel import gumbel_noise
from piecegraph.runner.token_record import TokenRecord, record_tokens


def gumbel_sample(
    logits: torch.Tensor,
    *,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
    record: TokenRecord | None = None,
) -> torch.Tensor:
    """One token a row of `logits`: argmax(logits / temperature + Gumbel noise), or argmax(logits) where greedy.

    That is a draw from softmax(logits / temperature), which is never built. The noise depends on a row's
    seed and position and the token only, so neither neighbours nor the order of rows matter. Of equal
    tokens the first wins; -inf and NaN are never drawn, unless a row has nothing else: that gives 0.

    Args:
        logits: `[num_reqs, vocab_size]` float32, float16 or bfloat16, a row's numbers next to each other.
        idx_mapping: `[num_reqs]` int32, the state row of each row; -1 is padding, which gives 0.
        temperature: `[max_num_reqs]` float32 by state row; 0 is greedy and draws no noise.
        seeds: `[max_num_reqs]` int64 by state row.
        positions: `[num_reqs]` int32, where the tokens will stand.
        out: `[num_reqs]` int64, written and returned; without it a new tensor is.
        record: requests' states, to which the tokens are added (`record_tokens`); mutated.

    On a GPU it waits for nothing and can be captured: what is launched depends on shapes only.
    """
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.device.type == "cuda":
        from piecegraph.runner.sampling.kernels.gumbel_sample import gumbel_sample_on_gpu

        gumbel_sample_on_gpu(logits, idx_mapping.contiguous(), temperature, seeds, positions.contiguous(), out, record)
    else:
        gumbel_sample_reference(logits, idx_mapping, temperature, seeds, positions, out)
        if record is not None:
            record_tokens(record, out, idx_mapping=idx_mapping, positions=positions)
    return out


def gumbel_sample_reference(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """What the kernel draws, in torch. Writes `out`."""
    row = idx_mapping.long()
    is_real = row >= 0
    row = row.clamp(min=0)
    at = torch.nonzero(is_real & (temperature[row] > 0)).squeeze(1)
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    if len(at) > 0:
        scaled = scores[at] / temperature[row[at]].unsqueeze(1)
        noise = gumbel_noise(seeds[row[at]], positions[at].long(), logits.shape[1])
        scores = scores.index_copy(0, at, scaled + noise)
    out.copy_(scores.argmax(-1) * is_real)
