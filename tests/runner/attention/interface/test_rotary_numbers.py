"""Norm and rotation within attention are no less exact than ahead of it, as models do them in their dtype: on a CPU and
by the kernels, for decode and for mixed batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.triton.backend import TritonBackend
from tests.passes.ops.test_rms_norm import EPS, exact_norm, gemma_norm, llama_norm
from tests.passes.relative_error import Tensors, assert_no_less_exact

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_SIZE = 16
MAX_LEN = 128


@dataclass(frozen=True, kw_only=True)
class Heads:
    num_q_heads: int
    num_kv_heads: int
    dim: int
    rotary_dim: int
    norm: str = ""  # "llama": times weight; "gemma": times 1 + weight

    @property
    def norm_offset(self) -> float:
        return 1.0 if self.norm == "gemma" else 0.0


KINDS = {
    "normed": Heads(num_q_heads=16, num_kv_heads=8, dim=128, rotary_dim=128, norm="llama"),
    "not normed": Heads(num_q_heads=9, num_kv_heads=3, dim=64, rotary_dim=64),
    "partly rotated": Heads(num_q_heads=4, num_kv_heads=4, dim=80, rotary_dim=32),
    "normed with 1 + weight": Heads(num_q_heads=8, num_kv_heads=4, dim=256, rotary_dim=256, norm="gemma"),
}

SHAPES = [(num_reqs, past, 1) for num_reqs in (1, 2, 5, 6) for past in (0, 9, 31, 32, 63, 90)]
SHAPES += [(1, 0, 17), (3, 20, 18), (4, 40, 21), (6, 70, 20)]
"""Requests; tokens cached of the first, while each has one more than the one before; tokens new of the later half of
requests, those before decode. Kernels are compiled for none of these numbers."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`rows` and `cached_rows` say where each request's tokens are among the new ones and among those cached."""

    heads: Heads
    rows: tuple[slice, ...]
    cached_rows: tuple[slice, ...]
    cached_slots: torch.Tensor  # [cached tokens]
    metadata: AttentionMetadata

    @property
    def num_new(self) -> int:
        return self.rows[-1].stop

    @property
    def num_cached(self) -> int:
        return self.cached_rows[-1].stop


def make_batch(heads: Heads, shape: Sequence[int], dtype: torch.dtype, device: str) -> Batch:
    """In shuffled blocks of a cache."""
    num_reqs, past, new = shape
    num_decode_reqs = num_reqs if new == 1 else num_reqs // 2
    pasts = [past + request for request in range(num_reqs)]
    news = [1 if request < num_decode_reqs else new for request in range(num_reqs)]
    random = torch.Generator().manual_seed(0)
    block_table = torch.randperm(num_reqs * MAX_LEN // BLOCK_SIZE, generator=random).view(num_reqs, -1)
    slots = (block_table[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
    old = [own[:p] for own, p in zip(slots, pasts, strict=True)]
    fresh = [own[p : p + n] for own, p, n in zip(slots, pasts, news, strict=True)]
    starts = [0, *accumulate(news)]
    layer = AttentionLayer(
        name="layer", num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads, key_dim=heads.dim,
        value_dim=heads.dim, dtype=dtype, scale=heads.dim**-0.5, window=0, softcap=0.0, has_sinks=False,
    )  # fmt: skip
    common = AttentionMetadata(
        num_reqs=num_reqs,
        num_tokens=sum(news),
        max_query_len=max(news),
        num_decode_reqs=num_decode_reqs,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([p + n for p, n in zip(pasts, news, strict=True)], dtype=torch.int32, device=device),
        block_table=block_table.to(device, torch.int32),
        slot_mapping=torch.cat(fresh).to(device),
        host=None,
    )
    builder = TritonBackend().metadata_builder([layer], BLOCK_SIZE, torch.device(device), max_num_reqs=num_reqs)
    return Batch(
        heads=heads,
        rows=tuple(slice(*each) for each in pairwise(starts)),
        cached_rows=tuple(slice(*each) for each in pairwise([0, *accumulate(pasts)])),
        cached_slots=torch.cat(old).to(device),
        metadata=builder.build(common),
    )


def make_inputs(batch: Batch, shape: torch.Size, random: torch.Generator) -> Tensors:
    """Query, key and value as projected; cos and sin; the weights of both norms; keys and values that are cached."""
    heads = batch.heads
    angles = (torch.rand(batch.num_new, heads.rotary_dim // 2, generator=random) * 6.3).repeat(1, 2)
    query, key, value = (
        torch.randn(batch.num_new, num_heads, heads.dim, generator=random)
        for num_heads in (heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    weights = (torch.randn(heads.dim, generator=random) * 0.3 + 1 - heads.norm_offset for _ in range(2))
    cached = (torch.randn(batch.num_cached, heads.num_kv_heads, heads.dim, generator=random) for _ in range(2))
    return query, key, value, angles.cos(), angles.sin(), *weights, *cached


def within(batch: Batch, *inputs: torch.Tensor) -> Tensors:
    """What the pass makes of it."""
    query, key, value, cos, sin, q_weight, k_weight, *cached = inputs
    is_normed = bool(batch.heads.norm)
    rotary = Rotary(
        cos=cos,
        sin=sin,
        q_norm_weight=q_weight if is_normed else None,
        k_norm_weight=k_weight if is_normed else None,
        norm_eps=EPS if is_normed else None,
        norm_offset=batch.heads.norm_offset,
    )
    return _attend(batch, query.clone(), key, value, cached, rotary)  # queries may be rotated in place


def ahead(batch: Batch, *inputs: torch.Tensor) -> Tensors:
    """As models spell it, and attention without it."""
    query, key, value, cos, sin, q_weight, k_weight, *cached = inputs
    norm = {"": lambda x, weight: x, "llama": llama_norm, "gemma": gemma_norm}[batch.heads.norm]
    query, key = _rotated(norm(query, q_weight), norm(key, k_weight), cos, sin)
    return _attend(batch, query, key, value, cached, None)


def exact(batch: Batch, *inputs: torch.Tensor) -> Tensors:
    query, key, value, cos, sin, q_weight, k_weight, cached_key, cached_value = inputs
    if batch.heads.norm:
        query = exact_norm(query, q_weight + batch.heads.norm_offset)
        key = exact_norm(key, k_weight + batch.heads.norm_offset)
    query, key = _rotated(query, key, cos, sin)
    outs = []
    for new, old in zip(batch.rows, batch.cached_rows, strict=True):
        keys, values = torch.cat([cached_key[old], key[new]]), torch.cat([cached_value[old], value[new]])
        num_cached, num_new = len(keys) - len(key[new]), len(key[new])
        is_visible = torch.ones(num_new, len(keys), dtype=torch.bool, device=key.device).tril(num_cached)
        own, keys, values = (each.transpose(0, 1).unsqueeze(0) for each in (query[new], keys, values))
        out = F.scaled_dot_product_attention(own, keys, values, is_visible, enable_gqa=True)
        outs.append(out.squeeze(0).transpose(0, 1))
    return key, torch.cat(outs)


def _rotated(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    """The first numbers of each head, as many as the tables have: as transformers' PhiAttention spells it."""
    dim = cos.shape[1]
    turned = apply_rotary_pos_emb(query[..., :dim], key[..., :dim], cos, sin)
    return [torch.cat((part, whole[..., dim:]), dim=-1) for part, whole in zip(turned, (query, key), strict=True)]


def _attend(
    batch: Batch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached: Sequence[torch.Tensor],
    rotary: Rotary | None,
) -> Tensors:
    """The keys that are in the cache after it, and what is attended."""
    num_blocks = batch.metadata.block_table.numel()
    keys, values = (each.new_full((num_blocks, BLOCK_SIZE, *each.shape[1:]), float("nan")) for each in cached)
    kv_cache = KVCache(keys, values)
    for whole, past in zip((kv_cache.key, kv_cache.value), cached, strict=True):
        whole.flatten(0, 1)[batch.cached_slots] = past
    out = torch.empty_like(query)
    call = AttentionCall(query, key, value, out, batch.heads.dim**-0.5, rotary=rotary)
    TritonBackend().impl().forward(call, kv_cache, batch.metadata)
    return kv_cache.key.flatten(0, 1)[batch.metadata.slot_mapping], out


def check_against_models(
    heads: Heads, dtype: torch.dtype, device: str, shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> None:
    for shape in shapes:
        batch = make_batch(heads, shape, dtype, device)
        assert_no_less_exact(
            partial(within, batch),
            partial(ahead, batch),
            partial(exact, batch),
            partial(make_inputs, batch),
            [shape],
            dtype,
            device,
            num_terms=lambda shape: heads.dim + sum(shape),  # of a head's numbers, then of keys
        )


@pytest.mark.parametrize("shapes", [SHAPES[::5], pytest.param(SHAPES, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_no_less_exact_than_the_models_own(
    kind: str, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]]
) -> None:
    check_against_models(KINDS[kind], dtype, "cpu", shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_are_no_less_exact_than_the_models_own(kind: str, dtype: torch.dtype) -> None:
    check_against_models(KINDS[kind], dtype, "cuda")
