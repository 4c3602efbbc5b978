# mypy: disallow-untyped-decorators=False
"""The two Triton kernels of the penalties: one counts earlier tokens, one changes the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel

COUNT_BLOCK = 1024
"""Tokens of a request that a program counts."""
APPLY_BLOCK = 4096
"""Logits that a program changes."""
IN_PROMPT = 1 << 30
"""The bit of a token's count that is set if the prompt has the token; the bits below count it in the output."""


def apply_penalties_on_gpu(
    logits: torch.Tensor,
    selected: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Penalise `logits` as `penalties.apply_penalties_reference` does; allocates counts of the selected rows only.

    The grid spans the longest possible request, because lengths are known on the device only; a program past the end
    of its request returns at once.
    """
    num_selected, vocab_size = selected.shape[0], logits.shape[1]
    counts = torch.zeros(num_selected, vocab_size, dtype=torch.int32, device=logits.device)
    _count[(num_selected, triton.cdiv(token_ids.shape[1], COUNT_BLOCK))](
        counts,
        selected,
        idx_mapping,
        positions,
        token_ids,
        token_ids.stride(0),
        table,
        vocab_size,
        IN_PROMPT=IN_PROMPT,
        BLOCK=COUNT_BLOCK,
    )
    _apply[(num_selected, triton.cdiv(vocab_size, APPLY_BLOCK))](
        logits,
        logits.stride(0),
        counts,
        selected,
        idx_mapping,
        table,
        vocab_size,
        IN_PROMPT=IN_PROMPT,
        BLOCK=APPLY_BLOCK,
    )


@own_kernel
@triton.jit
def _count(  # type: ignore[no-untyped-def]  # compiled by Triton
    counts,  # [num_selected, vocab_size] int32, zeros, written
    selected,  # [num_selected] int32
    idx_mapping,  # [num_reqs] int32
    positions,  # [num_reqs] int32
    token_ids,  # [rows, max_model_len] int32
    token_ids_stride,
    table,  # [rows, 4] int32; see Penalties
    vocab_size,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.load(selected + tl.program_id(0)).to(tl.int64)
    position = tl.load(positions + at)
    first = tl.program_id(1) * BLOCK
    if first < position:
        row = tl.load(idx_mapping + at).to(tl.int64)
        prompt_len = tl.load(table + row * 4)
        index = first + tl.arange(0, BLOCK)
        token = tl.load(token_ids + row * token_ids_stride + index, mask=index < position, other=0)
        count = counts + tl.program_id(0).to(tl.int64) * vocab_size + token
        # The two atomic operations may mix, because neither changes the bits of the other.
        tl.atomic_or(count, IN_PROMPT, mask=(index < position) & (index < prompt_len), sem="relaxed")
        tl.atomic_add(count, 1, mask=(index < position) & (index >= prompt_len), sem="relaxed")


@own_kernel
@triton.jit
def _apply(  # type: ignore[no-untyped-def]  # compiled by Triton
    logits,  # [num_reqs, vocab_size] float32, written
    logits_stride,
    counts,  # [num_selected, vocab_size] int32
    selected,  # [num_selected] int32
    idx_mapping,  # [num_reqs] int32
    table,  # [rows, 4] int32; see Penalties
    vocab_size,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.load(selected + tl.program_id(0)).to(tl.int64)
    row = tl.load(idx_mapping + at).to(tl.int64)
    repetition = tl.load(table + row * 4 + 1).to(tl.float32, bitcast=True)
    frequency = tl.load(table + row * 4 + 2).to(tl.float32, bitcast=True)
    presence = tl.load(table + row * 4 + 3).to(tl.float32, bitcast=True)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    count = tl.load(counts + tl.program_id(0).to(tl.int64) * vocab_size + token, mask=is_token, other=0)
    is_seen = is_token & (count != 0)  # few tokens are: only their logits are read and written
    in_output = count & (IN_PROMPT - 1)
    logit = tl.load(logits + at * logits_stride + token, mask=is_seen, other=0.0)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit -= frequency * in_output.to(tl.float32)
    logit -= presence * (in_output > 0).to(tl.float32)
    tl.store(logits + at * logits_stride + token, logit, mask=is_seen)
