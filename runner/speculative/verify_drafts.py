"""What a step that verifies drafts does after it has drawn: it decides, records, and drafts for the next step.

The GPU runs one kernel, the CPU its torch reference.
"""

from __future__ import annotations

import torch

from piecegraph.runner.speculative.common.draft_source import DraftModel, DraftSource, PromptLookup
from piecegraph.runner.speculative.common.verified_rows import VerifiedRows
from piecegraph.runner.speculative.ngram import propose_ngrams
from piecegraph.runner.speculative.verification import (
    Decision,
    decide,
    record_decision,
    write_behind,
)
from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import PreparedRows


def verify_drafts(
    drawn: torch.Tensor,
    rows: VerifiedRows,
    *,
    buffers: InputBuffers,
    states: PreparedRows,
    prefill_lens: torch.Tensor,
    num_proposed: torch.Tensor,
    num_reqs: int,
    max_drafts: int,
    source: DraftSource,
) -> torch.Tensor:
    """Decide which of the tokens `drawn` `[num_logits]` int64 are new, record them, and draft the next.

    Returns `[num_reqs * (1 + max_drafts + NUM_COUNTS)]` int64: for each request the new tokens, padded with 0 to
    `1 + max_drafts`, how many they are, how many drafts were verified, how many are drafted for the next step, and the
    position of the first new token. Rows of padded requests mean nothing. Mutates `states.token_ids`,
    `states.num_computed_tokens`, `num_proposed` and, for a draft model, `source.draft_rows`. Idempotent while the
    drafts in `buffers.input_ids` are those of the step.

    Args:
        drawn: see above.
        rows: of this step (`verification.lay_out_rows`).
        buffers: the step's inputs.
        states: the requests' rows.
        prefill_lens: `[rows]` int32, by state row.
        num_proposed: `[rows]` int32, by state row.
        num_reqs: with padding.
        max_drafts: the most drafts of a request.
        source: where the next drafts come from.
    """
    if drawn.device.type == "cuda":
        from piecegraph.runner.speculative.kernels.verify import verify_drafts_on_gpu as verify
    else:
        verify = verify_drafts_reference
    return verify(
        drawn,
        rows,
        buffers=buffers,
        states=states,
        prefill_lens=prefill_lens,
        num_proposed=num_proposed,
        num_reqs=num_reqs,
        max_drafts=max_drafts,
        source=source,
    )


def verify_drafts_reference(
    drawn: torch.Tensor,
    rows: VerifiedRows,
    *,
    buffers: InputBuffers,
    states: PreparedRows,
    prefill_lens: torch.Tensor,
    num_proposed: torch.Tensor,
    num_reqs: int,
    max_drafts: int,
    source: DraftSource,
) -> torch.Tensor:
    """Return what `verify_drafts` does, as the torch reference of the kernel."""
    decision = decide(
        drawn,
        rows,
        max_drafts=max_drafts,
        idx_mapping=buffers.idx_mapping[:num_reqs],
        query_start_loc=buffers.query_start_loc[: num_reqs + 1],
        seq_lens=buffers.seq_lens[:num_reqs],
        input_ids=buffers.input_ids,
        prefill_lens=prefill_lens,
    )
    record_decision(decision, token_ids=states.token_ids, num_computed_tokens=states.num_computed_tokens)
    if isinstance(source, PromptLookup):
        count = _write_lookup(decision, source, states.token_ids, max_drafts)
    else:
        count = _room(decision, source, states.token_ids.shape[1], max_drafts)
        source.draft_rows.fill_(-1)
        source.draft_rows[:num_reqs] = torch.where(decision.num_tokens > 0, buffers.idx_mapping[:num_reqs], -1)
    num_proposed[decision.row] = torch.where(decision.is_real, count.int(), num_proposed[decision.row])
    counts = torch.stack([decision.num_tokens, rows.num_drafts[decision.source], count, decision.first], dim=1)
    return torch.cat([decision.tokens, counts], dim=1).flatten()


def _write_lookup(decision: Decision, source: PromptLookup, token_ids: torch.Tensor, max_drafts: int) -> torch.Tensor:
    """Write drafts behind the requests' tokens, and return how many, `[num_reqs]` int64."""
    num_tokens = torch.where(decision.num_tokens > 0, decision.first + decision.num_tokens, 0)
    drafts, count = propose_ngrams(
        token_ids[decision.row], num_tokens, num_drafts=max_drafts, shortest=source.shortest, longest=source.longest
    )
    write_behind(token_ids, decision.row, num_tokens, drafts, count)
    return count


def _room(decision: Decision, source: DraftModel, max_len: int, max_drafts: int) -> torch.Tensor:
    """Return how many drafts a draft model will write behind the requests' tokens, `[num_reqs]` int64.

    As many as there are slots in the cache for, and places in a row of tokens.
    """
    newest = decision.first + decision.num_tokens - 1
    last = torch.clamp(source.num_slots[decision.row].long(), max=max_len - 1)
    return torch.where(decision.num_tokens > 0, (last - newest).clamp(min=0, max=max_drafts), 0)
