"""Norm and rotary embedding by their definition, number by number in float64, and paged batches that need them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from piecegraph.runner.attention.interface.kv_cache import KVCache, KVScales
from piecegraph.runner.attention.interface.rotary import Rotary
from tests.runner.attention.paged_case import PagedCase, make_case, naive_attention

NORMS: dict[str, dict[str, Any]] = {
    "no norm": {},
    "norm": {"norm_eps": 1e-2, "has_weights": True},
    "norm of 1 + weight": {"norm_eps": 1e-6, "norm_offset": 1.0, "has_weights": True},
    "norm without weights": {"norm_eps": 1e-5},
}


@dataclass(frozen=True, kw_only=True)
class RotaryCase:
    raw: PagedCase  # query and key as projected
    rotary: Rotary
    rotated: PagedCase  # the same batch, query and key normed and rotated; what is expected of it


def make_rotary(
    num_tokens: int,
    key_dim: int,
    *,
    rotary_dim: int | None = None,
    norm_eps: float | None = None,
    norm_offset: float = 0.0,
    has_weights: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Rotary:
    """Random tables, each half another: more than any model asks for."""
    random = torch.Generator().manual_seed(1)
    angles = torch.rand(num_tokens, rotary_dim or key_dim, generator=random) * 6.3
    weights = [torch.randn(key_dim, generator=random).to(dtype) if has_weights else None for _ in range(2)]
    return Rotary(
        cos=angles.cos(), sin=angles.sin(), q_norm_weight=weights[0], k_norm_weight=weights[1],
        norm_eps=norm_eps, norm_offset=norm_offset,
    )  # fmt: skip


def rotate(x: torch.Tensor, rotary: Rotary, weight: torch.Tensor | None) -> torch.Tensor:
    """`x` `[tokens, heads, dim]` normed with its weight and rotated, rounded once to its dtype."""
    wide = x.double()
    if rotary.norm_eps is not None:
        wide = wide / (wide.pow(2).mean(-1, keepdim=True) + rotary.norm_eps).sqrt()
        if weight is not None:
            wide = wide * (rotary.norm_offset + weight.double())
    result, half = wide.clone(), rotary.dim // 2
    for number in range(rotary.dim):
        partner = -wide[..., number + half] if number < half else wide[..., number - half]
        cos, sin = rotary.cos[: len(x), number, None].double(), rotary.sin[: len(x), number, None].double()
        result[..., number] = wide[..., number] * cos + partner * sin
    return result.to(x.dtype)


def make_rotary_case(*, norm: str = "no norm", rotary_dim: int | None = None, **options: Any) -> RotaryCase:
    """`paged_case.make_case` with these options, of query and key that are still to be rotated."""
    raw = make_case(**options)
    dtype = torch.float32 if raw.query.dtype == torch.float64 else raw.query.dtype
    rotary = make_rotary(raw.metadata.num_tokens, raw.layer.key_dim, rotary_dim=rotary_dim, dtype=dtype, **NORMS[norm])
    query = rotate(raw.query, rotary, rotary.q_norm_weight)
    key = rotate(raw.key, rotary, rotary.k_norm_weight)
    starts, expected = raw.metadata.query_start_loc.tolist(), []
    block_size = raw.kv_cache.key.shape[1]
    for request, length in enumerate(raw.metadata.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        at = torch.arange(length - (rows.stop - rows.start))
        blocks = raw.metadata.block_table[request][at // block_size].long()
        keys = torch.cat([raw.kv_cache.key[blocks, at % block_size], key[rows]])
        values = torch.cat([raw.kv_cache.value[blocks, at % block_size], raw.value[rows]])
        expected.append(naive_attention(query[rows], keys, values, raw.layer, raw.sinks))
    return RotaryCase(raw=raw, rotary=rotary, rotated=replace(raw, query=query, key=key, expected=torch.cat(expected)))


def with_shifted_keys(case: RotaryCase) -> RotaryCase:
    """Return the case with a cache of keys less a constant of their head."""
    cache, (num_kv_heads, dim) = case.raw.kv_cache, case.raw.key.shape[1:]
    shift = torch.randint(-4, 5, (num_kv_heads, dim), generator=torch.Generator().manual_seed(2)).float()
    scales = KVScales(torch.ones(num_kv_heads), torch.ones(num_kv_heads), shift)
    return replace(case, raw=replace(case.raw, kv_cache=KVCache(cache.key - shift, cache.value, scales)))


def keys_of(cache: KVCache) -> torch.Tensor:
    """Return the keys that a cache holds, `[slots, num_kv_heads, key_dim]`, with what was subtracted added again."""
    keys = cache.key.flatten(0, 1)
    return keys if cache.scales is None or cache.scales.key_shift is None else keys + cache.scales.key_shift


def assert_rotated(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32's own noise, which may round a short type the other way."""
    rtol = 0.0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=rtol)


def check_rotated_cache(case: RotaryCase) -> None:
    """New keys are in their slots, rotated and rounded once (their sums may be added up in another order); values as
    they were; nothing else was written."""
    after, metadata = case.raw.kv_cache, case.raw.metadata
    is_real = metadata.slot_mapping >= 0
    slots = metadata.slot_mapping[is_real]
    assert_rotated(keys_of(after)[slots], case.rotated.key[is_real])
    assert torch.equal(after.value.flatten(0, 1)[slots], case.raw.value[is_real])
    for cached in (after.key, after.value):
        written = int((~cached.flatten(0, 1).isnan()).any(-1).any(-1).sum())
        assert written == int(metadata.seq_lens.sum())
