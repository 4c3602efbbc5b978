"""Acceptance by given rates instead of by the model, for measurements with random weights: answers mean nothing then.

The rates are vLLM's: for each place among a step's drafts, the probability that all drafts up to it are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.runner.sampling.philox import rand4x
from piecegraph.runner.speculative.common.verified_rows import VerifiedRows

_SALT = 0x5A17
"""What seeds are changed by, so that acceptance and sampling draw other numbers."""


def rates_of_length(length: float, max_drafts: int) -> tuple[float, ...]:
    """Return rates by which a verification gives `length` tokens in the mean, with the least variance."""
    left = length - 1
    return tuple(min(max(left - place, 0.0), 1.0) for place in range(max_drafts))


def conditional_rates(rates: Sequence[float]) -> list[float]:
    """Return the probability that each draft is accepted where those before it are."""
    before = 1.0
    found = []
    for rate in rates:
        found.append(rate / before if before > 0 else 0.0)
        before = rate
    return found


def synthetic_tokens(
    drawn: torch.Tensor,
    rows: VerifiedRows,
    *,
    input_ids: torch.Tensor,
    seeds: torch.Tensor,
    rates: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Return tokens for the rows of logits that accept drafts by `rates` `[max_drafts]` float32 (`conditional_rates`).

    A row whose draft is accepted gets the draft, another one the token that was `drawn` `[num_logits]` from it, or if
    that is the draft, the next token of the vocabulary. Chance is a function of the request's seed and the position.

    Args:
        drawn: see above.
        rows: of the step.
        input_ids: `[num_tokens]` int64, of the step.
        seeds: `[rows]` int64, by state row.
        rates: see above.
        vocab_size: the number of tokens.
    """
    num_logits = drawn.shape[0]
    places = torch.arange(num_logits, device=drawn.device)
    request = torch.searchsorted(rows.first_rows[1:], places, right=True).clamp(max=rows.num_drafts.shape[0] - 1)
    place = places - rows.first_rows[request]
    is_draft = (place < rows.num_drafts[request]) & (rows.idx_mapping[:num_logits] >= 0)
    draft = input_ids[(rows.logits_indices[:num_logits] + 1).clamp(max=input_ids.shape[0] - 1)]
    row = rows.idx_mapping[:num_logits].clamp(min=0).long()
    chance, *_ = rand4x(seeds[row] ^ _SALT, rows.positions[:num_logits].long())
    is_accepted = chance < rates[place.clamp(min=0, max=rates.shape[0] - 1)]
    other = torch.where(drawn == draft, (draft + 1) % vocab_size, drawn)
    return torch.where(is_draft, torch.where(is_accepted, draft, other), drawn)
