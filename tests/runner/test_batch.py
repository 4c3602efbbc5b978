"""A step's requests, flattened: each row knows its token, its position and its slot."""

from __future__ import annotations

import torch

from piecegraph.runner.batch import build_batch
from piecegraph.runner.request import Request
from piecegraph.runner.scheduler import ScheduledRequest
from tests.runner.make_request import make_request

CPU = torch.device("cpu")


def placed(request: Request, blocks: list[int], computed: int, output: list[int]) -> Request:
    request.block_ids, request.num_computed_tokens, request.output_token_ids = blocks, computed, output
    return request


def test_mixed_batch() -> None:
    """A decode, a whole prompt and a chunk; only the first two sample."""
    decode = placed(make_request("a", 5), [7, 2], 5, [42])
    prompt = placed(make_request("b", 3), [0], 0, [])
    chunk = placed(make_request("c", 9), [4, 1, 3], 4, [])
    batch = build_batch(
        [ScheduledRequest(decode, 1, True), ScheduledRequest(prompt, 3, True), ScheduledRequest(chunk, 2, False)],
        4,
        CPU,
    )
    assert batch.input_ids.tolist() == [42, 1, 2, 3, 5, 6]
    assert batch.positions.tolist() == [5, 0, 1, 2, 4, 5]
    assert batch.logits_indices.tolist() == [0, 3]
    assert batch.attention.query_start_loc.tolist() == [0, 1, 4, 6]
    assert batch.attention.seq_lens.tolist() == [6, 3, 6]
    assert batch.attention.slot_mapping.tolist() == [2 * 4 + 1, 0, 1, 2, 1 * 4 + 0, 1 * 4 + 1]
    assert batch.attention.block_table[0, :2].tolist() == [7, 2]
    assert batch.attention.host is not None and batch.attention.host.query_lens == (1, 3, 2)


def test_dtypes_are_those_promised() -> None:
    batch = build_batch([ScheduledRequest(placed(make_request("a", 2), [0], 0, []), 2, True)], 4, CPU)
    attention = batch.attention
    assert {batch.input_ids.dtype, batch.positions.dtype, batch.logits_indices.dtype} == {torch.int64}
    assert attention.slot_mapping.dtype == torch.int64
    assert {attention.query_start_loc.dtype, attention.seq_lens.dtype, attention.block_table.dtype} == {torch.int32}


def test_a_chunk_alone_selects_a_row_nobody_reads() -> None:
    """The model is never run for zero rows of logits."""
    batch = build_batch([ScheduledRequest(placed(make_request("a", 9), [0, 1, 2], 0, []), 3, False)], 4, CPU)
    assert batch.logits_indices.tolist() == [0]


def test_tokens_across_prompt_and_output() -> None:
    request = placed(make_request("a", 3), [0, 1], 0, [7, 8, 9])
    assert request.token_ids(1, 5) == [2, 3, 7, 8]
    assert request.token_ids(3, 5) == [7, 8]
    assert request.token_ids(0, 2) == [1, 2]
