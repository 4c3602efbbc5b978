"""Which tokens are likely enough beside the likeliest."""

from __future__ import annotations

import torch


def mask_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """`logits` with -inf for tokens less than `min_p` times as likely as the likeliest.

    Args:
        logits: `[num_reqs, vocab_size]` float32, after temperature.
        log_min_p: `[num_reqs]` float32, the logarithm of `min_p`; -inf turns it off.
    """
    least = logits.amax(-1) + log_min_p
    return logits.masked_fill(logits < least.unsqueeze(1), float("-inf"))
