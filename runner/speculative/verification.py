"""The rows of logits of a step that verifies drafts, which drafts are accepted, and the record of what a step decides.

All functions take and return tensors of fixed shapes and never wait for the device, so a graph can hold them.

Note [drafts lie behind the tokens]: the drafts for a request's next step are written to its row of tokens, behind the
last token. So the step that verifies them prepares its inputs as any other step does, and a sampling option that reads
the tokens before a position finds there what the target must be conditioned on. Whatever a step decides overwrites
them; keys and values of rejected drafts lie behind the computed tokens and are overwritten by the next step.

Note [a point mass]: rejection sampling (Leviathan et al., 2023; Chen et al., 2023) accepts a draft d that was chosen
without chance with the probability p(d) that the target gives it; else a token of p without d replaces it. Drawing a
token x from p and accepting d if x = d does just that, and x is the token of either case. So each row draws the token
that it would draw without drafts, with the same noise of (seed, position), and the output has the very tokens that it
has without speculation, greedy or sampled, up to the rounding of logits.

Block verification (Sun et al., 2024, https://arxiv.org/abs/2403.10444) is the same here in distribution: of drafts that
were chosen without chance both accept the first i or more with the product of the probabilities that the target gives
them (tests/runner/speculative/test_verification.py). So `rejection_sample_method="block"` is this rule.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from piecegraph.runner.speculative.common.verified_rows import VerifiedRows


def lay_out_rows(
    out: VerifiedRows,
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_proposed: torch.Tensor,
) -> None:
    """Fill `out` for a prepared batch.

    A request that has computed all tokens it was added with verifies: each of its tokens of this step but the first is
    a draft. Another one has a row for its last token only.

    Args:
        out: written.
        idx_mapping: `[max_num_reqs]` int32, the state row of each request; -1 is padding.
        query_start_loc: `[max_num_reqs + 1]` int32.
        positions: `[num_tokens]` int64, of the tokens of the batch.
        prefill_lens: `[rows]` int32 by state row, as are the next two.
        num_computed_tokens: int32, before this step.
        num_proposed: int32, the drafts that lie behind a request's tokens.
    """
    if idx_mapping.device.type == "cuda":
        from piecegraph.runner.speculative.kernels.verify import lay_out_rows_on_gpu as lay_out
    else:
        lay_out = lay_out_rows_reference
    lay_out(
        out,
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        positions=positions,
        prefill_lens=prefill_lens,
        num_computed_tokens=num_computed_tokens,
        num_proposed=num_proposed,
    )


def lay_out_rows_reference(
    out: VerifiedRows,
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_proposed: torch.Tensor,
) -> None:
    """Fill `out` like `lay_out_rows`, as the torch reference of the kernel."""
    row = idx_mapping.long()
    is_real, row = row >= 0, row.clamp(min=0)
    starts = query_start_loc.long()
    query_lens = starts[1:] - starts[:-1]
    is_verified = is_real & (num_computed_tokens[row] >= prefill_lens[row])
    num_rows = torch.where(is_verified, query_lens, 1) * is_real
    torch.cumsum(num_rows, 0, out=out.first_rows[1:])
    out.num_drafts.copy_(torch.minimum(num_rows - 1, num_proposed[row].long()) * is_verified)
    places = torch.arange(out.idx_mapping.shape[0], device=row.device)
    request = torch.searchsorted(out.first_rows[1:], places, right=True).clamp(max=row.shape[0] - 1)
    is_row = places < out.first_rows[-1]
    at = starts[request + 1] - num_rows[request] + places - out.first_rows[request]
    out.logits_indices.copy_(torch.where(is_row, at, 0))
    out.idx_mapping.copy_(torch.where(is_row, idx_mapping[request], -1))
    out.positions.copy_(torch.where(is_row, positions[out.logits_indices.clamp(max=positions.shape[0] - 1)] + 1, 0))


class Decision(NamedTuple):
    """What a step decides for each request."""

    tokens: torch.Tensor  # [num_reqs, max_drafts + 1] int64: drawn by the target; 0 behind the last
    num_tokens: torch.Tensor  # [num_reqs] int64: how many of them are new tokens; 0 for a part of a prompt
    first: torch.Tensor  # [num_reqs] int64: the position of the first
    row: torch.Tensor  # [num_reqs] int64: the state row; that of the first request for padding
    source: torch.Tensor  # [num_reqs] int64: the request itself; 0, the first, for padding
    is_real: torch.Tensor  # [num_reqs] bool: False if that request is padding itself


def decide(
    drawn: torch.Tensor,
    rows: VerifiedRows,
    *,
    max_drafts: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    input_ids: torch.Tensor,
    prefill_lens: torch.Tensor,
) -> Decision:
    """Return which of the tokens `drawn` `[num_logits]` int64, one for each row of logits, are a request's new tokens.

    These are the tokens up to the first that differs from the draft after it. See Note [a point mass].

    Args:
        drawn: see above.
        rows: of this step (`lay_out_rows`).
        max_drafts: the most drafts of a request.
        idx_mapping: `[num_reqs]` int32.
        query_start_loc: `[num_reqs + 1]` int32.
        seq_lens: `[num_reqs]` int32, with this step's tokens.
        input_ids: `[num_tokens]` int64, the step's tokens, among them the drafts.
        prefill_lens: `[rows]` int32, by state row.
    """
    num_reqs = idx_mapping.shape[0]
    places = torch.arange(max_drafts + 1, device=drawn.device)
    source = torch.arange(num_reqs, device=drawn.device) * (idx_mapping >= 0)
    row = idx_mapping[source].long().clamp(min=0)
    num_rows = (rows.first_rows[1 : num_reqs + 1] - rows.first_rows[:num_reqs])[source]
    at = rows.first_rows[source].unsqueeze(1) + places
    tokens = drawn[at.clamp(max=drawn.shape[0] - 1)]
    end = query_start_loc[1:].long()[source]
    drafts = input_ids[((end - num_rows + 1).unsqueeze(1) + places[:-1]).clamp(min=0, max=input_ids.shape[0] - 1)]
    is_draft = places[:-1] < rows.num_drafts[source].unsqueeze(1)
    num_accepted = ((drafts == tokens[:, :-1]) & is_draft).cumprod(1).sum(1)
    seq_lens = seq_lens[source].long()
    is_real = idx_mapping[source] >= 0
    num_tokens = torch.where(is_real & (seq_lens >= prefill_lens[row]), num_accepted + 1, 0)
    return Decision(
        tokens=tokens * (places < num_tokens.unsqueeze(1)),
        num_tokens=num_tokens,
        first=seq_lens - num_rows + 1,
        row=row,
        source=source,
        is_real=is_real,
    )


def record_decision(decision: Decision, *, token_ids: torch.Tensor, num_computed_tokens: torch.Tensor) -> None:
    """Write the new tokens into the requests' rows, and set how many tokens are computed. Idempotent.

    All tokens but the last new one are computed; of a request without new ones, all of its step.
    """
    first, num_tokens = decision.first, decision.num_tokens
    write_behind(token_ids, decision.row, first, decision.tokens, num_tokens)
    num_computed = (first + (num_tokens - 1).clamp(min=0)).int()
    num_computed_tokens[decision.row] = torch.where(decision.is_real, num_computed, num_computed_tokens[decision.row])


def write_behind(
    token_ids: torch.Tensor, row: torch.Tensor, first: torch.Tensor, tokens: torch.Tensor, count: torch.Tensor
) -> None:
    """Write `count` `[n]` of each row of `tokens` `[n, most]` to `token_ids[row]` from the position `first` on.

    Positions behind the end of a row are not written. All shapes are fixed: a place that is not to be written repeats
    the row's first write, or rewrites what the row's first place holds. Equal rows must have equal arguments.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    at = first.unsqueeze(1) + places
    is_written = (places < count.unsqueeze(1)) & (at < token_ids.shape[1])
    is_any = is_written[:, 0]
    unused_at = torch.where(is_any, first, 0).unsqueeze(1)
    unused = torch.where(is_any, tokens[:, 0].to(token_ids.dtype), token_ids[row, 0]).unsqueeze(1)
    at = torch.where(is_written, at, unused_at)
    token_ids[row.unsqueeze(1).expand_as(at), at] = torch.where(is_written, tokens.to(token_ids.dtype), unused)
