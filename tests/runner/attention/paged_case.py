"""Random mixed batches over a paged cache, and what naive attention makes of them one request at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from piecegraph.runner.attention.interface.kv_cache import KVCache, KVScales
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, AttentionMetadata, HostBatch
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.interface.rotary import Rotary

SLOPE_SCALE = 0.5
"""The scale of a bias by position, in cases that have one."""


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    layer: AttentionLayer
    metadata: AttentionMetadata
    kv_cache: KVCache  # past keys and values in their slots, NaN everywhere else
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    expected: torch.Tensor  # [real rows, num_q_heads, value_dim]

    def call(self, out: torch.Tensor | None = None, rotary: Rotary | None = None) -> AttentionCall:
        """Return the layer's call over the whole batch, with a result of NaN unless `out` is given."""
        if out is None:
            out = self.query.new_full((*self.query.shape[:2], self.value.shape[2]), float("nan"))
        layer = self.layer
        return AttentionCall(
            self.query, self.key, self.value, out, layer.scale, layer.window, layer.softcap, self.sinks, rotary=rotary,
            chunk_size=layer.chunk_size, slopes=self.slopes, slope_scale=SLOPE_SCALE,
        )  # fmt: skip


def make_case(
    *,
    lens: list[tuple[int, int]],  # (tokens cached, tokens new) a request
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    window: int = 0,
    chunk_size: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    slopes_dtype: torch.dtype | None = None,
    num_padded: int = 0,
    is_passed_freed: bool = False,
    is_in_order: bool = False,  # a request's blocks follow one another in the cache
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    is_e4m3: bool = False,  # the cache; keys and values are numbers that it holds
    scales: tuple[list[float], list[float]] | None = None,  # of an e4m3 cache: factors of keys and values by KV head
    is_shifted: bool = False,  # with `scales`, of powers of two: a constant is subtracted from a head's keys
    seed: int = 0,
) -> PagedCase:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    layer = AttentionLayer(
        name="layer",
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        scale=key_dim**-0.5,
        window=window,
        softcap=softcap,
        has_sinks=has_sinks,
        chunk_size=chunk_size,
        has_slopes=slopes_dtype is not None,
    )
    blocks_each = [-(-(past + new) // block_size) for past, new in lens]
    num_blocks = sum(blocks_each) + 3
    shuffled = torch.randperm(num_blocks, generator=random).tolist()
    if is_in_order:
        shuffled.sort(reverse=True)  # they are taken from the end
    block_table = torch.full((len(lens), max(blocks_each) + 1), num_blocks + 7)  # tails point outside the cache
    factors = None if scales is None else KVScales(*map(torch.tensor, scales))
    if factors is not None and is_shifted:  # sums with keys are exact
        shift = torch.randint(-4, 5, (num_kv_heads, key_dim), generator=random) * factors.key[:, None]
        factors = replace(factors, key_shift=shift)
    cache = KVCache(
        torch.full((num_blocks, block_size, num_kv_heads, key_dim), float("nan"), dtype=dtype),
        torch.full((num_blocks, block_size, num_kv_heads, value_dim), float("nan"), dtype=dtype),
    )
    sinks = normal(num_q_heads) if has_sinks else None
    slopes = normal(num_q_heads).abs().to(slopes_dtype) if slopes_dtype is not None else None
    slot_mapping: list[int] = []
    queries, keys, values, expected = [], [], [], []
    for row, (past, new) in enumerate(lens):
        block_table[row, : blocks_each[row]] = torch.tensor([shuffled.pop() for _ in range(blocks_each[row])])
        slots = [int(block_table[row, t // block_size]) * block_size + t % block_size for t in range(past + new)]
        key, value = normal(past + new, num_kv_heads, key_dim), normal(past + new, num_kv_heads, value_dim)
        if is_e4m3:
            key, value = (x.to(torch.float8_e4m3fn).to(dtype) for x in (key, value))
        if factors is not None:
            key, value = (key * factors.key[:, None]).to(dtype), (value * factors.value[:, None]).to(dtype)
            key = key if factors.key_shift is None else (key + factors.key_shift).to(dtype)
        # Whole blocks before the window or the chunk of the first new token may be another's by now, and hold anything.
        first = max(0, past - window + 1) // block_size * block_size if window and is_passed_freed else 0
        if chunk_size:
            first = past // chunk_size * chunk_size // block_size * block_size
        cache.key.flatten(0, 1)[slots[first:past]] = key[first:past]
        cache.value.flatten(0, 1)[slots[first:past]] = value[first:past]
        query = normal(new, num_q_heads, key_dim)
        slot_mapping += slots[past:]
        queries.append(query)
        keys.append(key[past:])
        values.append(value[past:])
        expected.append(naive_attention(query, key, value, layer, sinks, slopes))
    if is_e4m3:
        of_key, of_value = (1.0, 1.0) if factors is None else (factors.key[:, None], factors.value[:, None])
        of_keys = 0.0 if factors is None or factors.key_shift is None else factors.key_shift
        kept = (
            ((cache.key - of_keys) / of_key).to(torch.float8_e4m3fn),
            (cache.value / of_value).to(torch.float8_e4m3fn),
        )
        cache = KVCache(*kept, factors)
    slot_mapping += [PAD_SLOT_ID] * num_padded
    queries.append(normal(num_padded, num_q_heads, key_dim))
    keys.append(normal(num_padded, num_kv_heads, key_dim))
    values.append(normal(num_padded, num_kv_heads, value_dim))
    ends = [0]
    for _, new in lens:
        ends.append(ends[-1] + new)
    seq_lens = [past + new for past, new in lens]
    metadata = AttentionMetadata(
        num_reqs=len(lens),
        num_tokens=len(slot_mapping),
        max_query_len=max(new for _, new in lens),
        num_decode_reqs=sum(1 for _ in takewhile(lambda pair: pair[1] == 1, lens)),
        query_start_loc=torch.tensor(ends, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=block_table.to(torch.int32),
        slot_mapping=torch.tensor(slot_mapping),
        host=HostBatch(
            query_start_loc=tuple(ends),
            seq_lens=tuple(seq_lens),
            block_table=block_table,
            slot_mapping=torch.tensor(slot_mapping),
        ),
    )
    return PagedCase(
        layer=layer,
        metadata=metadata,
        kv_cache=cache,
        query=torch.cat(queries),
        key=torch.cat(keys),
        value=torch.cat(values),
        sinks=sinks,
        slopes=slopes,
        expected=torch.cat(expected),
    )


def by_value_factor(case: PagedCase, rows: torch.Tensor) -> torch.Tensor:
    """Return results `[rows, num_q_heads, value_dim]` over the factors of the values of their heads, float64."""
    if case.kv_cache.scales is None:
        return rows.double()
    groups = case.layer.num_q_heads // case.layer.num_kv_heads
    return rows.double() / case.kv_cache.scales.value.repeat_interleave(groups)[:, None]


def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: AttentionLayer,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """One request, one query and one head at a time, in float64; queries are the last of the sequence.

    Biases are products of a position and a slope in the dtype of the slopes, scaled.
    """
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=torch.float64)
    first = key.shape[0] - query.shape[0]
    for row in range(query.shape[0]):
        i = first + row
        visible = [j for j in range(i + 1) if not layer.window or j > i - layer.window]
        visible = [j for j in visible if not layer.chunk_size or j // layer.chunk_size == i // layer.chunk_size]
        for head in range(query.shape[1]):
            kv_head = head // (layer.num_q_heads // layer.num_kv_heads)
            scores = key[visible, kv_head].double() @ query[row, head].double() * layer.scale
            if layer.softcap:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if slopes is not None:
                scores += (slopes[head] * torch.tensor(visible)).double() * SLOPE_SCALE
            weights = (scores - scores.max() * (sinks is None)).exp()
            total = weights.sum() + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            out[row, head] = (weights / total) @ value[visible, kv_head].double()
    return out
