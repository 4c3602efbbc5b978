"""A step's requests as numbers."""

from __future__ import annotations

from piecegraph.runner.attention.metadata import PAD_SLOT_ID
from piecegraph.runner.batch import build_batch, host_batch
from piecegraph.runner.request import Request
from piecegraph.runner.scheduler import ScheduledRequest
from tests.runner.make_request import make_request


def placed(request: Request, blocks: list[int], computed: int, output: list[int]) -> Request:
    request.block_ids, request.num_computed_tokens, request.output_token_ids = blocks, computed, output
    return request


def mixed() -> list[ScheduledRequest]:
    """A decode, a whole prompt and a chunk."""
    decode = placed(make_request("a", 5), [7, 2], 5, [42])
    prompt = placed(make_request("b", 3), [0], 0, [])
    chunk = placed(make_request("c", 9), [4, 1, 3], 4, [])
    return [ScheduledRequest(decode, 1, True), ScheduledRequest(prompt, 3, True), ScheduledRequest(chunk, 2, False)]


def test_mixed_batch() -> None:
    batch = build_batch(mixed())
    assert batch.request_ids == ("a", "b", "c")
    assert batch.query_lens == (1, 3, 2)
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.num_decode_reqs) == (3, 6, 3, 1)


def test_host_batch_places_every_row_and_pads() -> None:
    host = host_batch(mixed(), 4, num_tokens=8)
    assert host.query_start_loc == (0, 1, 4, 6)
    assert host.seq_lens == (6, 3, 6)
    assert host.slot_mapping.tolist() == [2 * 4 + 1, 0, 1, 2, 1 * 4 + 0, 1 * 4 + 1, PAD_SLOT_ID, PAD_SLOT_ID]
    assert host.block_table[0, :2].tolist() == [7, 2]


def test_tokens_across_prompt_and_output() -> None:
    request = placed(make_request("a", 3), [0, 1], 0, [7, 8, 9])
    assert request.token_ids(1, 5) == [2, 3, 7, 8]
    assert request.token_ids(3, 5) == [7, 8]
    assert request.token_ids(0, 2) == [1, 2]
