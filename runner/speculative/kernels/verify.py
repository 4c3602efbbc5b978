"""The Triton kernels of a verification: one lays out its rows of logits, the other decides, records and drafts.

Together they replace some two hundred launches of the torch references, which at few requests took as long as the
model's own kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.speculative.common.draft_source import DraftModel, DraftSource, PromptLookup
from piecegraph.runner.speculative.common.verified_rows import NUM_COUNTS, VerifiedRows
from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import PreparedRows

BLOCK = 1024
"""The number of places of a text, or of padded rows, that a program looks at together."""


def lay_out_rows_on_gpu(
    out: VerifiedRows,
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_proposed: torch.Tensor,
) -> None:
    """Fill `out` on the GPU; see `verification.lay_out_rows`."""
    num_reqs = idx_mapping.shape[0]
    _lay_out_rows[(1,)](
        idx_mapping,
        query_start_loc,
        positions,
        prefill_lens,
        num_computed_tokens,
        num_proposed,
        *out,
        num_reqs,
        out.logits_indices.shape[0],
        BLOCK_REQS=triton.next_power_of_2(num_reqs),
        BLOCK=BLOCK,
    )


def verify_drafts_on_gpu(
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
    """Return a step's result, computed on the GPU; see `verify_drafts.verify_drafts`. Padding has rows of 0."""
    num_columns = 1 + max_drafts + NUM_COUNTS
    out = torch.empty(num_reqs * num_columns, dtype=torch.int64, device=drawn.device)
    is_lookup = isinstance(source, PromptLookup)
    shortest, longest = (source.shortest, source.longest) if isinstance(source, PromptLookup) else (0, 0)
    if isinstance(source, DraftModel):
        source.draft_rows.fill_(-1)
    _verify_drafts[(num_reqs,)](
        drawn,
        rows.first_rows,
        rows.num_drafts,
        buffers.idx_mapping,
        buffers.query_start_loc,
        buffers.seq_lens,
        buffers.input_ids,
        prefill_lens,
        states.token_ids,
        states.token_ids.stride(0),
        states.num_computed_tokens,
        num_proposed,
        None if isinstance(source, PromptLookup) else source.num_slots,
        None if isinstance(source, PromptLookup) else source.draft_rows,
        out,
        shortest,
        longest,
        states.token_ids.shape[1],
        MAX_DRAFTS=max_drafts,
        NUM_COLUMNS=num_columns,
        BLOCK_TOKENS=triton.next_power_of_2(1 + max_drafts),
        IS_LOOKUP=is_lookup,
        BLOCK=BLOCK,
    )
    return out


@own_kernel
@triton.jit(do_not_specialize=["num_reqs", "num_logits"])
def _lay_out_rows(  # type: ignore[no-untyped-def]  # compiled by Triton
    idx_mapping,  # [num_reqs] int32
    query_start_loc,  # [num_reqs + 1] int32
    positions,  # [num_tokens] int64
    prefill_lens,  # [rows] int32
    num_computed_tokens,  # [rows] int32
    num_proposed,  # [rows] int32
    first_rows,  # [num_reqs + 1] int64, written but for the first, which stays 0
    logits_indices,  # [num_logits] int64, written
    row_idx_mapping,  # [num_logits] int32, written
    row_positions,  # [num_logits] int32, written
    num_drafts,  # [num_reqs] int64, written
    num_reqs,
    num_logits,
    BLOCK_REQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: one program, because where a request's rows begin depends on all requests before it."""
    request = tl.arange(0, BLOCK_REQS)
    is_request = request < num_reqs
    row = tl.load(idx_mapping + request, mask=is_request, other=-1)
    is_real = row >= 0
    start = tl.load(query_start_loc + request, mask=is_request, other=0)
    stop = tl.load(query_start_loc + request + 1, mask=is_request, other=0)
    computed = tl.load(num_computed_tokens + row, mask=is_real, other=0)
    prefill_len = tl.load(prefill_lens + row, mask=is_real, other=1)
    proposed = tl.load(num_proposed + row, mask=is_real, other=0)
    is_verified = is_real & (computed >= prefill_len)
    num_rows = tl.where(is_verified, stop - start, is_real.to(tl.int32))
    end = tl.cumsum(num_rows, axis=0)
    first = end - num_rows
    tl.store(first_rows + 1 + request, end.to(tl.int64), mask=is_request)
    verified = tl.where(is_verified, tl.minimum(num_rows - 1, proposed), 0)
    tl.store(num_drafts + request, verified.to(tl.int64), mask=is_request)
    for place in range(tl.max(num_rows, axis=0)):
        to = first + place
        is_row = (place < num_rows) & (to < num_logits)
        at = stop - num_rows + place
        position = tl.load(positions + at, mask=is_row, other=0)
        tl.store(logits_indices + to, at.to(tl.int64), mask=is_row)
        tl.store(row_idx_mapping + to, row, mask=is_row)
        tl.store(row_positions + to, (position + 1).to(tl.int32), mask=is_row)
    for begin in range(tl.sum(num_rows, axis=0), num_logits, BLOCK):
        to = begin + tl.arange(0, BLOCK)
        is_padding = to < num_logits
        tl.store(logits_indices + to, tl.zeros([BLOCK], tl.int64), mask=is_padding)
        tl.store(row_idx_mapping + to, tl.full([BLOCK], -1, tl.int32), mask=is_padding)
        tl.store(row_positions + to, tl.zeros([BLOCK], tl.int32), mask=is_padding)


@own_kernel
@triton.jit
def _load_tokens(known, drawn, first, at, is_read):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Load the tokens at the places `at` of a request's text, int32; 0 where they are not read.

    `known`: its row of tokens, which counts before the place `first`. `drawn`: the tokens from there on. What this
    program writes to the row need so not be visible to its other threads.
    """
    old = tl.load(known + at, mask=is_read & (at < first), other=0)
    new = tl.load(drawn + (at - first), mask=is_read & (at >= first), other=0)
    return tl.where(at < first, old, new.to(tl.int32))


@own_kernel
@triton.jit(do_not_specialize=["shortest", "longest"])
def _verify_drafts(  # type: ignore[no-untyped-def]  # compiled by Triton
    drawn,  # [num_logits] int64
    first_rows,  # [num_reqs + 1] int64
    num_drafts,  # [num_reqs] int64
    idx_mapping,  # [num_reqs] int32
    query_start_loc,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    input_ids,  # [num_tokens] int64
    prefill_lens,  # [rows] int32
    token_ids,  # [rows, max_len] int32, written
    token_ids_stride,
    num_computed_tokens,  # [rows] int32, written
    num_proposed,  # [rows] int32, written
    num_slots,  # [rows] int32, or None
    draft_rows,  # [num_reqs] int32, written, or None
    out,  # [num_reqs, NUM_COLUMNS] int64, written
    shortest,
    longest,
    max_len,
    MAX_DRAFTS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,  # 1 + MAX_DRAFTS, padded to a power of two
    IS_LOOKUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_reqs,)."""
    request = tl.program_id(0)
    places = tl.arange(0, BLOCK_TOKENS)
    result = out + request * NUM_COLUMNS
    row = tl.load(idx_mapping + request).to(tl.int64)
    if row < 0:  # padding
        for column in range(NUM_COLUMNS):
            tl.store(result + column, 0)
        return
    first_row = tl.load(first_rows + request)
    num_rows = (tl.load(first_rows + request + 1) - first_row).to(tl.int32)
    num_verified = tl.load(num_drafts + request).to(tl.int32)
    end = tl.load(query_start_loc + request + 1)
    seq_len = tl.load(seq_lens + request)
    new = drawn + first_row
    tokens = tl.load(new + places, mask=places < num_rows, other=0)
    is_draft = places < num_verified
    drafts = tl.load(input_ids + (end - num_rows + 1 + places), mask=is_draft, other=-1)
    num_accepted = tl.min(tl.where(is_draft & (drafts == tokens), BLOCK_TOKENS, places), axis=0)
    num_tokens = tl.where(seq_len >= tl.load(prefill_lens + row), num_accepted + 1, 0)
    first = seq_len - num_rows + 1
    known = token_ids + row * token_ids_stride
    is_new = places < num_tokens
    tl.store(known + first + places, tokens.to(tl.int32), mask=is_new & (first + places < max_len))
    tl.store(num_computed_tokens + row, first + tl.maximum(num_tokens - 1, 0))

    text_len = tl.where(num_tokens > 0, first + num_tokens, 0)
    count = 0
    if IS_LOOKUP:
        best = tl.full([], -1, tl.int64)
        for begin in range(0, text_len - 1, BLOCK):
            match_end = begin + tl.arange(0, BLOCK)
            is_match = match_end < text_len - 1
            length = tl.zeros([BLOCK], tl.int32)
            for back in range(tl.minimum(longest, text_len)):
                last = _load_tokens(known, new, first, text_len - 1 - back, True)
                is_match = is_match & (match_end >= back)
                is_match = is_match & (_load_tokens(known, new, first, match_end - back, is_match) == last)
                length += is_match.to(tl.int32)
            rank = length.to(tl.int64) * max_len + (max_len - 1 - match_end)
            best = tl.maximum(best, tl.max(tl.where(length >= shortest, rank, -1), axis=0))
        match = max_len - 1 - (best % max_len).to(tl.int32)
        count = tl.where(best >= 0, tl.minimum(text_len - 1 - match, MAX_DRAFTS), 0)
        found = _load_tokens(known, new, first, match + 1 + places, places < count)
        tl.store(known + text_len + places, found, mask=(places < count) & (text_len + places < max_len))
    else:
        room = tl.minimum(tl.load(num_slots + row), max_len - 1) - (text_len - 1)
        count = tl.where(num_tokens > 0, tl.minimum(tl.maximum(room, 0), MAX_DRAFTS), 0)
        tl.store(draft_rows + request, tl.where(num_tokens > 0, row, -1).to(tl.int32))
    tl.store(num_proposed + row, count)
    tl.store(result + places, tl.where(is_new, tokens, 0), mask=places <= MAX_DRAFTS)
    counts = result + MAX_DRAFTS + 1
    tl.store(counts, num_tokens.to(tl.int64))
    tl.store(counts + 1, num_verified.to(tl.int64))
    tl.store(counts + 2, count.to(tl.int64))
    tl.store(counts + 3, first.to(tl.int64))
