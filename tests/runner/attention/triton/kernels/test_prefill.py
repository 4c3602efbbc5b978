"""The general kernel equals naive attention for any mix of requests, and reads nothing it should not."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from piecegraph.runner.attention.triton.reference import write_kv
from tests.interpreter import interpreted_case
from tests.runner.attention.paged_case import by_value_factor, make_case

SCALES = ([0.25, 3.0], [700.0, 0.125])
"""By KV head, of keys and of values: of the first head, values are beyond the range of e4m3."""

LENS = [(9, 1), (0, 1), (0, 13), (37, 21)]


def check(*, block_m: int = 16, block_n: int = 16, first_req: int = 0, num_sms: int = 0, **kind: object) -> None:
    """Requests before `first_req` and padded rows are left alone. With `num_sms`, keys are split."""
    from piecegraph.runner.attention.triton.kernels import prefill
    from piecegraph.runner.attention.triton.kernels.prefill import prefill_call
    from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
    from piecegraph.runner.attention.triton.layouts.prefill_config import PrefillConfig

    case = make_case(**{"lens": LENS, **kind})  # type: ignore[arg-type]
    layer, batch = case.layer, case.metadata
    batch.block_table[batch.block_table >= case.kv_cache.key.shape[0]] = 0x7F7F7F7F
    num_rows = case.expected.shape[0]
    write_kv(
        case.key[:num_rows], case.value[:num_rows],
        kv_cache=case.kv_cache, slot_mapping=batch.slot_mapping[:num_rows],
    )  # fmt: skip
    out = case.query.new_full((case.query.shape[0], layer.num_q_heads, layer.value_dim), float("nan"))
    prefill.MIN_SPLIT_LEN = 16  # type: ignore[attr-defined]  # in a process of its own: tiny cases split, too
    workspace = SplitWorkspace.allocate(
        num_partials=2**14, num_values=2**14 * layer.value_dim, num_counts=2**10, device=torch.device("cpu")
    )
    call = prefill_call(
        case.call(out), case.kv_cache,
        query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens, block_table=batch.block_table,
        first_req=first_req, num_reqs=batch.num_reqs, num_rows=batch.num_tokens - first_req,
        config=PrefillConfig(block_m=block_m, block_n=block_n, num_warps=4, num_stages=2),
        workspace=workspace if num_sms else None, max_len=4096 if num_sms else 0, num_sms=num_sms,
    )  # fmt: skip
    assert (call.grid[2] > 1) == bool(num_sms), call.grid
    call.launch()
    assert not workspace.arrivals.any()
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3}[out.dtype]
    found, wanted = by_value_factor(case, out[first_req:num_rows]), by_value_factor(case, case.expected[first_req:])
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=1e-3)
    assert out[:first_req].isnan().all()
    assert out[num_rows:].isnan().all()


CASES = {
    "mixed": check,
    "after decodes": partial(check, first_req=2),
    "padded": partial(check, lens=[*LENS, (0, 0), (0, 0)], num_padded=5),
    "nothing but padding": partial(check, lens=[(0, 0)], num_padded=3),
    "no groups": partial(check, num_q_heads=2),
    "groups of 3": partial(check, num_q_heads=6),
    "groups of 8, one kv head": partial(check, num_q_heads=8, num_kv_heads=1, block_m=64),
    "more heads than rows of a small tile": partial(check, num_q_heads=20, num_kv_heads=1, block_m=32),
    "window of one": partial(check, window=1),
    "wide window": partial(check, window=40),
    "window over several tiles": partial(check, lens=[(0, 90)], window=33, num_q_heads=2),
    "blocks before the window are freed": partial(check, window=5, is_passed_freed=True),
    "some of a tile is freed": partial(check, window=40, is_passed_freed=True, softcap=2.0),
    "all at once": partial(check, window=18, softcap=2.0, has_sinks=True, key_dim=12, value_dim=20),
    "a tile in a block": partial(check, block_size=32),
    "a tile is a block": partial(check, block_size=16, dtype=torch.float16),
    "blocks of one": partial(check, block_size=1),
    "blocks of three": partial(check, block_size=3),
    "float16": partial(check, dtype=torch.float16, key_dim=24, value_dim=16),
    "split after decodes, padded": partial(check, lens=[*LENS, (0, 0)], num_padded=5, first_req=2, num_sms=24),
    "split, texts with drafts": partial(check, lens=[(150, 5), (17, 5), (0, 1)], has_sinks=True, num_sms=16),
    "split, window hides splits from later rows": partial(check, lens=[(100, 21)], window=17, num_sms=24),
    "split, blocks before the window are freed": partial(
        check, lens=[(60, 5), (9, 3)], window=40, is_passed_freed=True, num_sms=16
    ),
    "split, all at once": partial(
        check,
        lens=[(70, 5)],
        window=50,
        softcap=2.0,
        has_sinks=True,
        key_dim=12,
        value_dim=20,
        num_q_heads=6,
        block_m=32,
        num_sms=16,
    ),
    "e4m3": partial(check, is_e4m3=True, window=10),
    "e4m3 with factors": partial(check, is_e4m3=True, scales=SCALES, window=10, softcap=2.0, has_sinks=True),
    "e4m3 with factors, float16, split": partial(check, is_e4m3=True, scales=SCALES, dtype=torch.float16, num_sms=16),
    "many requests": partial(check, lens=[(0, 2)] * 3 + [(0, 0)] * 300 + [(0, 3)], num_q_heads=16, num_kv_heads=1),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_naive_attention(name: str) -> None:
    interpreted_case(__name__, name)
