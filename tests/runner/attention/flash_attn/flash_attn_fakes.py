"""Stand-ins for the packages of the flash-attn family: what they compute, in plain torch, and what they demand."""

from __future__ import annotations

from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)


def _attend(
    query: torch.Tensor,  # [query_len, num_q_heads, dim]; the last of the keys
    key: torch.Tensor,  # [num_keys, num_kv_heads, dim]
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if key.shape[0] == 0:
        return torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1).double() for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(query.shape[0])[:, None] + key.shape[0] - query.shape[0]
    j = torch.arange(key.shape[0])
    left, right = window
    hidden = torch.zeros(i.shape[0], j.shape[0], dtype=torch.bool)
    if causal:
        hidden |= j > i
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def _gathered(cache: torch.Tensor, table_row: torch.Tensor, length: int) -> torch.Tensor:
    """What a row's request wrote; the rest of the cache and of the row is poison."""
    page = cache.shape[1]
    blocks = table_row[: -(-length // page)].long()
    return cache[blocks].flatten(0, 1)[:length]


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, num_reqs: int) -> None:
    assert query.dtype in HALF
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == table.stride(-1) == 1
    assert table.dtype == torch.int32
    assert table.shape[0] == num_reqs
    assert query.shape[-1] == key.shape[-1]
    assert key.dim() == value.dim() == 4
    assert query.shape[-2] % key.shape[2] == 0


def _check_int32(tensor: torch.Tensor, size: int) -> None:
    assert tensor.dtype == torch.int32
    assert tensor.is_contiguous()
    assert tensor.shape == (size,)


class FakeFlashAttn2:
    """`flash_attn_2_cuda` of 2.8.3."""

    def __init__(self) -> None:
        self.splits: list[int] = []

    def fwd_kvcache(self, *args: Any) -> list[torch.Tensor]:
        (
            q, k_cache, v_cache, k, v, seqlens, cos, sin, batch_index, left_pad, table, alibi, out, scale, causal,
            left, right, softcap, interleaved, num_splits,
        ) = args  # fmt: skip
        assert k is v is cos is sin is batch_index is left_pad is alibi is None
        assert interleaved is True
        assert type(causal) is bool
        num_reqs, query_len, num_heads, dim = q.shape
        _check(q, k_cache, v_cache, table, num_reqs)
        _check_int32(seqlens, num_reqs)
        assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert dim % 8 == 0
        swapped = query_len == 1 and num_heads > k_cache.shape[2] and left < 0 and right < 0
        assert not swapped, "out must have shape (batch, groups, KV heads, dim)"
        assert out.shape == q.shape
        assert out.stride(-1) == 1
        self.splits.append(num_splits)
        for request, length in enumerate(seqlens.tolist()):
            key, value = (_gathered(x, table[request], length) for x in (k_cache, v_cache))
            out[request] = _attend(
                q[request], key, value, scale=scale, causal=causal and query_len > 1, window=(left, right),
                softcap=softcap,
            )  # fmt: skip
        return [out]

    def varlen_fwd(self, *args: Any) -> list[torch.Tensor]:
        (
            q, k_cache, v_cache, out, starts, key_starts, seqused, left_pad, table, alibi, max_query_len, max_key_len,
            dropout, scale, zero, causal, left, right, softcap, probabilities, generator,
        ) = args  # fmt: skip
        assert left_pad is alibi is generator is None
        assert zero is probabilities is False
        assert dropout == 0.0
        num_reqs = starts.shape[0] - 1
        _check(q, k_cache, v_cache, table, num_reqs)
        _check_int32(starts, num_reqs + 1)
        _check_int32(key_starts, num_reqs + 1)
        _check_int32(seqused, num_reqs)
        assert k_cache.shape[1] % 256 == 0
        assert max_query_len > 1, "the result would not be in `out`"
        assert max_query_len >= int(starts.diff().max())
        assert max_key_len >= int(seqused.max())
        assert out.shape == q.shape
        for request, length in enumerate(seqused.tolist()):
            rows = slice(int(starts[request]), int(starts[request + 1]))
            key, value = (_gathered(x, table[request], length) for x in (k_cache, v_cache))
            out[rows] = _attend(q[rows], key, value, scale=scale, causal=causal, window=(left, right), softcap=softcap)
        return [out]


def fake_flash_attn_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> torch.Tensor:
    """`flash_attn_interface.flash_attn_with_kvcache`; rows of no request hold whatever memory held."""
    num_reqs = page_table.shape[0]
    _check(q, k_cache, v_cache, page_table, num_reqs)
    _check_int32(cache_seqlens, num_reqs)
    out = torch.full((*q.shape[:-1], v_cache.shape[3]), float("nan"), dtype=q.dtype)
    if cu_seqlens_q is None:
        assert q.dim() == 4
    else:
        _check_int32(cu_seqlens_q, num_reqs + 1)
        assert max_seqlen_q is not None
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    for request, length in enumerate(cache_seqlens.tolist()):
        rows: Any = request
        if cu_seqlens_q is not None:
            rows = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        key, value = (_gathered(x, page_table[request], length) for x in (k_cache, v_cache))
        out[rows] = _attend(
            q[rows], key, value, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap
        )
    return out


def fake_flash_attn_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    softcap: float,
    learnable_sink: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`flash_attn.cute.interface._flash_attn_fwd`."""
    num_reqs = page_table.shape[0]
    _check(q, k, v, page_table, num_reqs)
    _check_int32(cu_seqlens_q, num_reqs + 1)
    _check_int32(seqused_k, num_reqs)
    assert out.is_contiguous()
    assert out.dtype == q.dtype
    assert out.shape == (*q.shape[:2], v.shape[3])
    if learnable_sink is not None:
        assert learnable_sink.shape == (q.shape[1],)
        assert not learnable_sink.requires_grad
    window = tuple(-1 if side is None else side for side in (window_size_left, window_size_right))
    for request, length in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        key, value = (_gathered(x, page_table[request], length) for x in (k, v))
        out[rows] = _attend(
            q[rows], key, value, scale=softmax_scale, causal=causal, window=(window[0], window[1]), softcap=softcap,
            sinks=learnable_sink,
        )  # fmt: skip
