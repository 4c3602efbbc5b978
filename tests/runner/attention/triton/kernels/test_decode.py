"""The decode kernel equals naive attention for any batch of single tokens, whatever else is in memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from piecegraph.runner.attention.interface.kv_cache import KVCache, KVScales
from piecegraph.runner.attention.interface.op_call import AttentionCall
from tests.compiled_for_gpu import asked_before_the_wait, compiled_for_gpu
from tests.gpus import H200
from tests.interpreter import interpreted_case
from tests.runner.attention.paged_case import by_value_factor, make_case
from tests.runner.attention.rotary_case import NORMS, make_rotary

LENS = [(9, 1), (0, 1), (66, 1)]
SCALES = ([0.25, 3.0], [700.0, 0.125])
"""By KV head, of keys and of values: of the first head, values are beyond the range of e4m3."""

SHIFTED = ([0.25, 4.0], [700.0, 0.125])
"""The same with powers of two for keys, whose sums with a constant are exact then."""

LONG = [(40, 1), (0, 1), (90, 1), (130, 1), (3, 1)]


def check(
    *,
    num_launches: int = 1,
    num_splits: int = 3,
    min_split_len: int = 16,
    num_extra: int = 0,
    carry_pages: bool = True,
    merged: bool = False,
    **kind: object,
) -> None:
    """Launches share a workspace. The cache is NaN wherever nothing was written; block tables end in numbers that would
    crash whoever looks them up."""
    from piecegraph.runner.attention.triton.kernels.decode import decode_call
    from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
    from piecegraph.runner.attention.triton.layouts.decode_config import DecodeConfig

    case = make_case(**{"lens": LENS, **kind})  # type: ignore[arg-type]
    layer, batch = case.layer, case.metadata
    batch.block_table[batch.block_table >= case.kv_cache.key.shape[0]] = 0x7F7F7F7F
    query, key, value = case.query, case.key, case.value
    if merged:  # as slices of one projection's output
        qkv = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1)
        slices = qkv.split([query[0].numel(), key[0].numel(), value[0].numel()], dim=1)
        query, key, value = (
            x.unflatten(1, like.shape[1:]) for x, like in zip(slices, (query, key, value), strict=True)
        )
    config = DecodeConfig(
        block_n=16, num_warps=4, num_stages=2, num_splits=num_splits, min_split_len=min_split_len,
        num_extra=num_extra, carry_pages=carry_pages,
    )  # fmt: skip
    num_partials = config.num_partials(batch.num_reqs) * layer.num_q_heads
    workspace = SplitWorkspace.allocate(
        num_partials=num_partials,
        num_values=num_partials * layer.value_dim,
        num_counts=batch.num_reqs * layer.num_q_heads,
        device=query.device,
    )
    workspace.out.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    num_rows = case.expected.shape[0]
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3}[query.dtype]
    for _ in range(num_launches):
        out = query.new_full((query.shape[0], layer.num_q_heads, layer.value_dim), float("nan"))
        decode_call(
            case.call(out)._replace(query=query, key=key, value=value), case.kv_cache,
            seq_lens=batch.seq_lens, block_table=batch.block_table, slot_mapping=batch.slot_mapping,
            num_reqs=batch.num_reqs, workspace=workspace, config=config,
        ).launch()  # fmt: skip
        assert not workspace.arrivals.any(), "the next launch finds the counts at zero"
        found, wanted = by_value_factor(case, out[:num_rows]), by_value_factor(case, case.expected)
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=1e-3)
        assert out[num_rows:].isnan().all(), "padded rows are not written"
    slots = batch.slot_mapping[:num_rows]
    scales = case.kv_cache.scales
    of_key, of_value = (1.0, 1.0) if scales is None else (scales.key[:, None], scales.value[:, None])
    shift = 0.0 if scales is None or scales.key_shift is None else scales.key_shift
    for cached, new, factor, less in (
        (case.kv_cache.key, key, of_key, shift),
        (case.kv_cache.value, value, of_value, 0.0),
    ):
        numbers = (cached.float() * factor + less).to(new.dtype).flatten(0, 1)
        assert torch.equal(numbers[slots], new[:num_rows])
        num_written = int((~numbers.isnan()).any(-1).any(-1).sum())
        assert num_written == int(batch.seq_lens.sum()) or kind.get("is_passed_freed")


CASES = {
    "several splits": partial(check, num_launches=2),
    "one split": partial(check, num_splits=1),
    "many splits": partial(check, num_splits=20, lens=[(290, 1)], block_size=16, num_kv_heads=1),
    "splits are long enough": partial(check, min_split_len=32),
    "long requests are split": partial(check, num_splits=4, num_extra=8, min_split_len=32, lens=LONG),
    "more parts than extra programs": partial(check, num_splits=4, num_extra=3, lens=LONG),
    "one extra program": partial(check, num_splits=4, num_extra=1, lens=LONG),
    "nothing is long": partial(check, num_splits=4, num_extra=3, min_split_len=500, lens=LONG),
    "long requests and a window": partial(check, num_splits=4, num_extra=6, window=70, lens=LONG, has_sinks=True),
    "long requests and padding": partial(
        check, num_splits=20, num_extra=30, lens=[*LONG, (0, 0), (0, 0)], num_padded=2, num_q_heads=6
    ),
    "pages looked up as they come": partial(check, carry_pages=False),
    "slices of a merged projection": partial(check, merged=True),
    "padded requests": partial(check, lens=[*LENS, (0, 0), (0, 0)], num_padded=2),
    "no groups": partial(check, num_q_heads=2),
    "groups of 8, one kv head": partial(check, num_q_heads=8, num_kv_heads=1),
    "more heads than a program takes": partial(check, num_q_heads=70, num_kv_heads=1, lens=[(20, 1)]),
    "window of one": partial(check, window=1),
    "wide window over splits": partial(check, window=40),
    "blocks before the window are freed": partial(check, window=5, is_passed_freed=True),
    "some of a tile is freed": partial(check, window=40, is_passed_freed=True, softcap=2.0),
    "all at once": partial(check, window=40, softcap=2.0, has_sinks=True, key_dim=12, value_dim=20),
    "a tile in a block": partial(check, block_size=32),
    "a tile is a block": partial(check, block_size=16, dtype=torch.float16),
    "blocks of one": partial(check, block_size=1),
    "blocks of three": partial(check, block_size=3),
    "float16": partial(check, dtype=torch.float16, key_dim=24, value_dim=16),
    "e4m3": partial(check, is_e4m3=True, window=40, has_sinks=True),
    "e4m3 with factors": partial(check, is_e4m3=True, scales=SCALES, window=40, has_sinks=True),
    "e4m3 of shifted keys": partial(check, is_e4m3=True, scales=SHIFTED, is_shifted=True, window=40, num_launches=2),
    "e4m3 of shifted keys of 12 numbers": partial(
        check, is_e4m3=True, scales=SHIFTED, is_shifted=True, key_dim=12, num_q_heads=6
    ),
    "e4m3 with factors, float16": partial(check, is_e4m3=True, scales=SCALES, dtype=torch.float16, softcap=2.0),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_naive_attention(name: str) -> None:
    interpreted_case(__name__, name)


GPU_SHAPES: list[tuple[Any, ...]] = [
    (1, 16, 8, 128, torch.bfloat16, {}),
    (8, 16, 8, 128, torch.bfloat16, {}),
    (8, 32, 8, 128, torch.bfloat16, {"cached": torch.float8_e4m3fn, "is_scaled": True}),
    (256, 16, 8, 128, torch.bfloat16, {}),
    (1, 16, 8, 128, torch.float32, {}),
    (1, 8, 4, 256, torch.bfloat16, {"window": 512, "softcap": 50.0}),
    (2, 32, 1, 80, torch.float16, {}),
]
GPU_KERNELS = [
    pytest.param(*shape, norm, marks=() if shape in GPU_SHAPES[1:3] else pytest.mark.slow)
    for norm in ("norm", "no norm", None)
    for shape in GPU_SHAPES
]
"""With rotary embeddings and norms of heads, the largest kernel; the others, in one shape in the fast suite."""


@pytest.mark.parametrize(("num_reqs", "num_q_heads", "num_kv_heads", "dim", "dtype", "options", "norm"), GPU_KERNELS)
def test_it_compiles_for_a_gpu(
    num_reqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    norm: str | None,
) -> None:
    """In the layout that an H200 takes, whose memory it must fit."""
    from piecegraph.runner.attention.triton.kernels.decode import decode_call
    from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
    from piecegraph.runner.attention.triton.layouts.decode_config import decode_config
    from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape

    query = torch.zeros(num_reqs, num_q_heads, dim, dtype=dtype)
    key, value = torch.zeros(2, num_reqs, num_kv_heads, dim, dtype=dtype)
    config = decode_config(
        HeadShape.of(query, value), num_reqs=num_reqs, max_len=40960, num_sms=H200.num_sms,
        shared_bytes=H200.shared_bytes, can_overlap=True,
    )  # fmt: skip
    partials = config.num_partials(num_reqs) * num_q_heads
    of_layer = {name: option for name, option in options.items() if name not in ("cached", "is_scaled")}
    scales = None
    if "is_scaled" in options:
        scales = KVScales(torch.ones(num_kv_heads), torch.ones(num_kv_heads), torch.zeros(num_kv_heads, dim))
    keys, values = torch.zeros(2, 4, 16, num_kv_heads, dim, dtype=options.get("cached") or dtype)
    rotary = None if norm is None else make_rotary(num_reqs, dim, **NORMS[norm], dtype=dtype)
    call = decode_call(
        AttentionCall(query, key, value, query.clone(), scale=1.0, **of_layer, rotary=rotary),
        KVCache(keys, values, scales),
        seq_lens=torch.zeros(num_reqs, dtype=torch.int32), block_table=torch.zeros(num_reqs, 99, dtype=torch.int32),
        slot_mapping=torch.zeros(num_reqs, dtype=torch.int64), num_reqs=num_reqs, config=config,
        workspace=SplitWorkspace.allocate(
            num_partials=partials, num_values=partials * dim, num_counts=num_reqs * num_q_heads, device=query.device
        ),
    )  # fmt: skip
    compiled = compiled_for_gpu(call.kernel, call.arguments, call.options)
    # Keys and values, and the scale of a head's keys, which no kernel of a step writes.
    assert asked_before_the_wait(compiled) == (2 * (config.num_stages - 1), int("is_scaled" in options))
