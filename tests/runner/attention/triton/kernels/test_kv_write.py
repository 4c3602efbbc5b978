"""Keys and values land in their slots, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from piecegraph.runner.attention.interface.kv_cache import KVCache, KVScales
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.reference import write_kv
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted_case
from tests.runner.attention.rotary_case import NORMS, make_rotary


def check(
    *,
    first_row: int = 0,
    num_tokens: int = 37,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    cached: torch.dtype | None = None,
    scales: tuple[list[float], list[float]] | None = None,
    is_shifted: bool = False,
) -> None:
    """Bitwise like the reference: slots out of order, some of them padding, keys and values strided apart."""
    from piecegraph.runner.attention.triton.kernels.kv_write import kv_write_call

    random = torch.Generator().manual_seed(0)
    kv = torch.randn(37, 2, 40, generator=random).to(dtype)
    if cached is not None:  # Triton's interpreter rounds carries wrongly, so these are numbers that the cache holds
        kv = kv.to(cached).to(dtype)
        kv[::7] = 1000.0  # beyond its range
    factors = None if scales is None else KVScales(*map(torch.tensor, scales))
    if factors is not None:
        kv = torch.cat([kv[:, :, :24] * factors.key[:, None], kv[:, :, 24:] * factors.value[:, None]], dim=2).to(dtype)
    if factors is not None and is_shifted:
        shift = torch.randint(-4, 5, (2, 24), generator=random) * factors.key[:, None]
        factors = replace(factors, key_shift=shift)
        kv[:, :, :24] += shift
    key, value = kv[:, :, :24], kv[:, :, 24:]
    slots = torch.randperm(12 * block_size, generator=random)[:37]
    slots = torch.cat([slots, torch.full((37 - slots.shape[0],), -1)])
    slots[::5] = -1
    caches = [KVCache(torch.zeros(12, block_size, 2, 24), torch.zeros(12, block_size, 2, 16)) for _ in range(2)]
    written, expected = (
        KVCache(cache.key.to(cached or dtype), cache.value.to(cached or dtype), factors) for cache in caches
    )
    query = torch.randn(37, 4, 24, generator=random).to(dtype)
    untouched = query.clone()
    kv_write_call(
        key, value, kv_cache=written, slot_mapping=slots, first_row=first_row, num_tokens=num_tokens, query=query
    ).launch()
    assert torch.equal(query, untouched)
    rows = slice(first_row, num_tokens)
    write_kv(key[rows], value[rows], kv_cache=expected, slot_mapping=slots[rows])
    assert expected.key.float().any()
    assert torch.equal(written.key.float(), expected.key.float())
    assert torch.equal(written.value.float(), expected.value.float())


CASES = {
    "all rows": check,
    "some rows": partial(check, first_row=3, num_tokens=36),
    "blocks of one": partial(check, block_size=1),
    "blocks of three": partial(check, block_size=3),
    "float16": partial(check, dtype=torch.float16, block_size=16),
    "e4m3": partial(check, cached=torch.float8_e4m3fn),
    "e4m3 with factors": partial(check, cached=torch.float8_e4m3fn, scales=([0.25, 3.0], [700.0, 0.125])),
    "e4m3 of shifted keys": partial(
        check, cached=torch.float8_e4m3fn, scales=([0.25, 4.0], [700.0, 0.125]), is_shifted=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    interpreted_case(__name__, name)


@pytest.mark.parametrize(
    ("norm", "cached"), [*((norm, torch.bfloat16) for norm in (*NORMS, None)), (None, torch.float8_e4m3fn)]
)
def test_it_compiles_for_a_gpu(norm: str | None, cached: torch.dtype) -> None:
    """Every kind of norm, and nothing rotated, and a cache in e4m3, which takes its largest number for larger ones."""
    from piecegraph.runner.attention.triton.kernels.kv_write import kv_write_call

    qkv = torch.zeros(256, 32, 128, dtype=torch.bfloat16)
    scales = KVScales(torch.ones(8), torch.ones(8), torch.zeros(8, 128)) if cached is torch.float8_e4m3fn else None
    keys, values = torch.zeros(2, 4, 16, 8, 128, dtype=cached)
    cache = KVCache(keys, values, scales)
    rotary = None if norm is None else make_rotary(256, 128, **NORMS[norm], dtype=torch.bfloat16)
    call = kv_write_call(
        qkv[:, 16:24], qkv[:, 24:], kv_cache=cache, slot_mapping=torch.zeros(256, dtype=torch.int64), first_row=0,
        num_tokens=256, query=qkv[:, :16], rotary=rotary,
    )  # fmt: skip
    ptx = compile_for_gpu(call.kernel, call.arguments, call.options)
    assert ("satfinite.e4m3" in ptx) == (cached is torch.float8_e4m3fn)


def test_programs_of_a_long_batch_take_several_heads_and_none_is_left_out() -> None:
    from piecegraph.runner.attention.triton.kernels.kv_write import MAX_HEADS, kv_write_layout

    shape = HeadShape(num_q_heads=16, num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    rotary = make_rotary(1, 128)
    layouts = [kv_write_layout(shape, num_rows, rotary) for num_rows in (1, 512, 4096, 16384, 100_000)]
    heads = [layout.heads for layout in layouts]
    assert heads == sorted(heads) and heads[0] == heads[1] == 1 and heads[-1] == MAX_HEADS
    for layout in layouts:
        assert (layout.grid[0] - 1) * layout.heads < 24 <= layout.grid[0] * layout.heads
    assert kv_write_layout(shape, 100_000, None).grid[0] == 8


def test_the_reference_writes_slots_that_are_not_negative() -> None:
    cache = KVCache(torch.zeros(3, 2, 1, 2), torch.zeros(3, 2, 1, 1))
    key, value = torch.arange(1.0, 7.0).view(3, 1, 2), torch.arange(1.0, 4.0).view(3, 1, 1)
    write_kv(key, value, kv_cache=cache, slot_mapping=torch.tensor([5, -1, 2]))
    assert cache.key.view(6, 2).tolist() == [[0, 0], [0, 0], [5, 6], [0, 0], [0, 0], [1, 2]]
    assert cache.value.flatten().tolist() == [0, 0, 3, 0, 0, 1]
