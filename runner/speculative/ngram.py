"""Drafts by prompt lookup: the tokens that followed the last time the last tokens occurred. Nothing leaves the device.

The method is that of prompt-lookup decoding, with vLLM's choice among several matches: the longest, and of equally long
ones the earliest, which has the most tokens after it.
"""

from __future__ import annotations

import torch


def propose_ngrams(
    token_ids: torch.Tensor, num_tokens: torch.Tensor, *, num_drafts: int, shortest: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drafts `[num_reqs, num_drafts]` int32 and how many of each row are drafts, `[num_reqs]` int64.

    A row's last n tokens are looked up among its earlier ones, for the largest n from `longest` down to `shortest` that
    is found. The tokens after the match are its drafts; the rest of the row is 0.

    Args:
        token_ids: `[num_reqs, max_model_len]` int32, of which a row's first `num_tokens` count.
        num_tokens: `[num_reqs]` int64; a row of 0 gets no drafts.
        num_drafts: the most drafts of a row, 1 or more.
        shortest: the smallest n, 1 or more.
        longest: the largest n.
    """
    num_reqs, max_len = token_ids.shape
    device = token_ids.device
    ends = torch.arange(max_len, device=device)  # where a match may end
    is_match = ends < (num_tokens - 1).unsqueeze(1)  # [num_reqs, max_len]
    length = torch.zeros(num_reqs, max_len, dtype=torch.int64, device=device)
    for back in range(min(longest, max_len)):
        at = num_tokens - 1 - back
        last = token_ids.gather(1, at.clamp(min=0, max=max_len - 1).unsqueeze(1))  # [num_reqs, 1]
        is_equal = torch.zeros_like(is_match)
        is_equal[:, back:] = token_ids[:, : max_len - back] == last
        is_match = is_match & is_equal & (at >= 0).unsqueeze(1)
        length += is_match
    rank = torch.where(length >= shortest, length * max_len + (max_len - 1 - ends), -1)
    best, end = rank.max(dim=1)
    count = torch.where(best >= 0, (num_tokens - 1 - end).clamp(min=0, max=num_drafts), 0)
    places = torch.arange(num_drafts, device=device)
    source = (end.unsqueeze(1) + 1 + places).clamp(max=max_len - 1)
    drafts = torch.where(places < count.unsqueeze(1), token_ids.gather(1, source), 0)
    return drafts, count
