"""Which tokens may be drawn."""

from __future__ import annotations

import torch


def mask_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`logits` with -inf for tokens outside the `top_k` likeliest, then outside the `top_p` nucleus.

    Args:
        logits: `[num_reqs, vocab_size]` float32, after temperature.
        top_k: `[num_reqs]` int64; `vocab_size` turns it off. Tokens that tie with the last kept stay.
        top_p: `[num_reqs]` float32; 1 turns it off. Probabilities are those after top-k; the token that
            reaches `top_p` is kept, so one always is. Of equal tokens the first ones are kept.
    """
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    last_kept = sorted_logits.gather(1, (top_k - 1).unsqueeze(1))
    sorted_logits = sorted_logits.masked_fill(sorted_logits < last_kept, float("-inf"))
    probabilities = sorted_logits.softmax(-1)
    reached_before = probabilities.cumsum(-1) - probabilities
    is_outside = (reached_before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    is_outside[:, 0] = False
    sorted_logits = sorted_logits.masked_fill(is_outside, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, sorted_logits)
