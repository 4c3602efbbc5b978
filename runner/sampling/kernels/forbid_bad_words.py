# mypy: disallow-untyped-decorators=False
"""The Triton kernel that masks tokens which complete a bad word, with one program a word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


def forbid_bad_words_on_gpu(
    logits: torch.Tensor,
    selected: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    *,
    max_num_words: int,
) -> None:
    """Mask `logits` as `bad_words.forbid_bad_words_reference` does. `max_num_words`: the most words of a request."""
    _forbid_bad_words[(selected.shape[0], max_num_words)](
        logits,
        logits.stride(0),
        selected,
        idx_mapping,
        positions,
        token_ids,
        token_ids.stride(0),
        table,
        table.stride(0),
        num_warps=1,
    )


@own_kernel
@triton.jit(do_not_specialize=["table_stride"])
def _forbid_bad_words(  # type: ignore[no-untyped-def]  # compiled by Triton
    logits,  # [num_reqs, vocab_size] float32, written
    logits_stride,
    selected,  # [num_selected] int32
    idx_mapping,  # [num_reqs] int32
    positions,  # [num_reqs] int32
    token_ids,  # [rows, max_model_len] int32
    token_ids_stride,
    table,  # [rows, table_stride] int32; see BadWords
    table_stride,
):
    at = tl.load(selected + tl.program_id(0)).to(tl.int64)
    row = tl.load(idx_mapping + at).to(tl.int64)
    words = table + row * table_stride
    word = tl.program_id(1)
    if word < tl.load(words + 1):
        first = tl.load(words + 2 + word)
        last = tl.load(words + 3 + word) - 1
        begin_len = last - first
        position = tl.load(positions + at)
        if begin_len <= position - tl.load(words):
            num_equal = 0
            history = token_ids + row * token_ids_stride + position - begin_len
            for i in range(begin_len):
                num_equal += (tl.load(words + first + i) == tl.load(history + i)).to(tl.int32)
            if num_equal == begin_len:
                tl.store(logits + at * logits_stride + tl.load(words + last), float("-inf"))
