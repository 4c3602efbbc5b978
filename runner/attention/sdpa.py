"""Attention through torch's `scaled_dot_product_attention`: the backend for CPUs, correct on any device.

Keys and values of a call are gathered from the cache into one dense tensor, so this backend copies what a paged kernel
would read in place; those of one request that follow one another in the cache are read there. Steps in which each
request has one token run on a CPU by a kernel of ours (`kernels/decode_attention.py`). The torch path is the reference
that faster backends are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.quantised.e4m3 import e4m3_to_bfloat16
from piecegraph.passes.ops.quantised.rounded_rows import MAX_E4M3
from piecegraph.runner.attention.interface.backend import AttentionBackend, AttentionCGSupport
from piecegraph.runner.attention.interface.cache_spec import Reach
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, AttentionMetadata, HostBatch
from piecegraph.runner.attention.interface.op_call import AttentionCall, position_bias
from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.kernels.decode_attention import BoundAttention, bind_attention
from piecegraph.runner.attention.kernels.norm_and_rotate import BoundRotation, bind_rotation
from piecegraph.runner.attention.triton.reference import rotated

Integers = npt.NDArray[np.int64]

QUERY_BLOCK = 128
"""Queries of a request that one call of torch computes: those of later blocks alone need the later keys, which torch's
kernel for CPUs computes for all of a call (a causal prompt of 512 took 1.3 times the processor time at once)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView:
    """The keys that a call gathers, and which of them each query sees."""

    slots: torch.Tensor  # [num_reqs, num_keys] int64; past a request's end, its last key again
    mask: torch.Tensor | None  # [num_reqs, 1, query_len, num_keys] bool; None: all, or `is_causal`
    is_causal: bool
    positions: torch.Tensor | None = None  # [num_reqs, num_keys] int64; None: no layer has a bias by position
    run: range | None = None  # the slots of one request, if they follow one another
    num_keys: torch.Tensor | None = None  # [num_reqs] int32 on the host, where each request has one query: its keys


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaCall:
    """Adjacent requests with equally many query rows each, computed by one call."""

    first_row: int
    last_row: int  # exclusive
    num_reqs: int
    query_len: int
    key_views: Mapping[Reach, KeyView]


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaMetadata(AttentionMetadata):
    """A step's batch as a list of calls, planned on the host."""

    calls: tuple[SdpaCall, ...]
    num_real_rows: int  # rows of requests; those after are padding
    write_rows: torch.Tensor | None  # rows whose key and value are written; None: all
    write_slots: torch.Tensor  # [rows written] int64
    write_run: range | None = None  # the same, if they follow one another
    is_one_query_each: bool = False  # rows of padding, if any, come last


class SdpaBackend(AttentionBackend):
    """The backend over torch's `scaled_dot_product_attention`."""

    name: ClassVar[str] = "sdpa"
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.NEVER  # calls depend on lengths
    needs_host_batch: ClassVar[bool] = True

    def layers_unsupported_reason(self, layers: Sequence[AttentionLayer], block_size: int) -> str | None:
        """Return None: any layer can run."""
        return None

    def unsupported_reason(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> str | None:
        """Return None: any layer can run on any device."""
        return None

    def metadata_builder(
        self, layers: Sequence[AttentionLayer], block_size: int, device: torch.device, *, max_num_reqs: int
    ) -> SdpaMetadataBuilder:
        """Return the builder of the calls of a step; it allocates nothing."""
        reaches = frozenset(layer.cache_spec.reach for layer in layers)
        return SdpaMetadataBuilder(reaches, block_size, device, any(layer.has_slopes for layer in layers))

    def impl(self) -> SdpaImpl:
        """Return an impl that serves all layers."""
        return SdpaImpl()


@dataclass(frozen=True, slots=True)
class SdpaMetadataBuilder:
    """A builder that plans the calls of a step on the host."""

    reaches: frozenset[Reach]  # every one that some layer has
    block_size: int
    device: torch.device
    keeps_positions: bool  # some layer has a bias by position

    def build(self, common: AttentionMetadata) -> SdpaMetadata:
        """Plan the calls of this step on the host, in numpy, and copy the result: nothing waits for the device."""
        host = common.host
        assert host is not None, "sdpa plans its calls on the host"
        slot_mapping: Integers = host.slot_mapping.numpy()
        is_real = slot_mapping != PAD_SLOT_ID
        write_rows = None if is_real.all() else is_real.nonzero()[0]
        write_slots = slot_mapping if write_rows is None else slot_mapping[write_rows]
        calls = tuple(self._call(host, reqs) for reqs in _batched_requests(host.query_lens))
        return SdpaMetadata(
            **{name: getattr(common, name) for name in AttentionMetadata.__dataclass_fields__},
            calls=calls,
            num_real_rows=host.query_start_loc[common.num_reqs],
            write_rows=None if write_rows is None else self._on_device(write_rows),
            write_slots=self._on_device(write_slots),
            write_run=_run_of(write_slots),
            is_one_query_each=(
                len(calls) == 1
                and calls[0].query_len == 1
                and len(write_slots) == calls[0].num_reqs  # none but the rows behind them are padding
            ),
        )

    def init_capture(self, common: AttentionMetadata) -> AttentionMetadata:
        """Raise: calls depend on lengths, so no FULL graph holds them."""
        raise AssertionError("sdpa's calls depend on the lengths of a batch: it is NEVER inside a full graph")

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        """Raise: there is never a capture."""
        raise AssertionError("sdpa was never captured")

    def _call(self, host: HostBatch, reqs: range) -> SdpaCall:
        return SdpaCall(
            first_row=host.query_start_loc[reqs.start],
            last_row=host.query_start_loc[reqs.stop],
            num_reqs=len(reqs),
            query_len=host.query_lens[reqs.start],
            key_views={reach: self._key_view(host, reqs, reach) for reach in host.reaches or self.reaches},
        )

    def _key_view(self, host: HostBatch, reqs: range, reach: Reach) -> KeyView:
        window, chunk_size = reach
        query_len = host.query_lens[reqs.start]
        seq_lens = np.array(host.seq_lens[reqs.start : reqs.stop])[:, None]  # [num_reqs, 1]
        first_query = seq_lens - query_len
        first_key = (first_query - window + 1).clip(0) if window else np.zeros_like(seq_lens)
        if chunk_size:
            first_key = first_query // chunk_size * chunk_size
        num_keys = int((seq_lens - first_key).max())
        keys = first_key + np.arange(num_keys)  # [num_reqs, num_keys]
        queries = (first_query + np.arange(query_len))[:, :, None]  # [num_reqs, query_len, 1]
        visible = keys[:, None] <= queries
        if window:
            visible &= keys[:, None] > queries - window
        if chunk_size:
            visible &= keys[:, None] >= queries // chunk_size * chunk_size
        is_causal = len(reqs) == 1 and query_len > 1 and num_keys == query_len
        is_causal = is_causal and (not window or window >= num_keys) and not chunk_size
        is_causal &= query_len <= QUERY_BLOCK or self.device.type != "cpu"
        keys = np.minimum(keys, seq_lens - 1)
        blocks = host.block_table.numpy()[np.array(reqs)[:, None], keys // self.block_size]
        slots = blocks * self.block_size + keys % self.block_size
        return KeyView(
            slots=self._on_device(slots),
            mask=None if is_causal or visible.all() else self._on_device(visible[:, None]),
            is_causal=is_causal,
            positions=self._on_device(keys) if self.keeps_positions else None,
            run=_run_of(slots[0]) if len(reqs) == 1 else None,
            num_keys=torch.from_numpy((seq_lens - first_key)[:, 0].astype(np.int32)) if query_len == 1 else None,
        )

    def _on_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _run_of(slots: Integers) -> range | None:
    """Return slots `[n]` as a range if they follow one another."""
    if not len(slots):
        return None
    run = range(int(slots[0]), int(slots[0]) + len(slots))
    return run if slots[-1] == run[-1] and bool((np.diff(slots) == 1).all()) else None


def _batched_requests(query_lens: Sequence[int]) -> list[range]:
    """Return the requests of each call: adjacent requests with one row each together, any other request alone."""
    calls: list[range] = []
    first = 0
    for query_len, group in groupby(query_lens):
        end = first + len(list(group))
        calls += [range(first, end)] if query_len == 1 else [range(r, r + 1) for r in range(first, end)]
        first = end
    return calls


class SdpaImpl:
    """One layer by dense attention over gathered keys and values."""

    def forward(self, call: AttentionCall, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Run one layer as `AttentionImpl.forward` does; rows of padding in `call.out` become zero."""
        assert isinstance(metadata, SdpaMetadata), type(metadata)
        query, key, value, out = call.query, call.key, call.value, call.out
        if call.rotary is not None:
            query, key = _rotated(query, key, call.rotary)
        if metadata.is_one_query_each and _decode(call, query, key, kv_cache, metadata):
            return
        scales, of_values = kv_cache.scales, None
        if scales is not None:  # a head's factors are one of its query, and one of its result
            groups = query.shape[1] // key.shape[1]
            of_query, of_values = (each.repeat_interleave(groups)[:, None] for each in (scales.key, scales.value))
            query = (query * of_query).to(query.dtype)
        if metadata.write_rows is not None:
            key, value = key[metadata.write_rows], value[metadata.write_rows]
        if scales is not None and scales.key_shift is not None:
            key = key - scales.key_shift
        slots, run = metadata.write_slots, metadata.write_run
        cached_keys = cached_values = _by_slot(kv_cache.key)
        _write(cached_keys, slots, key, None if scales is None else scales.key, run)
        if not call.is_latent:
            cached_values = _by_slot(kv_cache.value)
            _write(cached_values, slots, value, None if scales is None else scales.value, run)
        for batched in metadata.calls:
            view = batched.key_views[call.reach]
            rows = query[batched.first_row : batched.last_row]
            written = out[batched.first_row : batched.last_row]
            keys = _read(cached_keys, view.slots, rows.dtype, view.run).transpose(1, 2)
            if call.is_latent:
                values = keys[..., : value.shape[2]]
            else:
                values = _read(cached_values, view.slots, rows.dtype, view.run).transpose(1, 2)
            if batched.query_len == 1 and not (call.softcap or call.sinks is not None or call.slopes is not None):
                found = attend_one_query(rows, keys, values, view.mask, call.scale)
                if of_values is not None:
                    found = found * of_values.view(keys.shape[1], -1, 1)
                written.view(found.shape).copy_(found)
                continue
            attended = attend(
                rows.unflatten(0, (batched.num_reqs, batched.query_len)).transpose(1, 2),
                keys,
                values,
                view,
                scale=call.scale,
                softcap=call.softcap,
                sinks=call.sinks,
                bias=None if call.slopes is None else _bias(call, view),
            )
            found = attended.transpose(1, 2).flatten(0, 1)
            written.copy_(found if of_values is None else found * of_values)
        out[metadata.num_real_rows :].zero_()

    def prepare(self, call: AttentionCall, kv_cache: KVCache) -> Callable[[AttentionMetadata], None]:
        """Bind the call, and on a CPU our kernels."""
        return _Launch.of(call, kv_cache)


def _rotated(query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key normed and rotated; that of the query may be its own memory."""
    bound = bind_rotation(query, key, rotary)
    if bound is None:
        return rotated(query, key, rotary)
    bound.run()
    return query, bound.key


@dataclass(frozen=True, slots=True)
class _Launch:
    """One layer over fixed tensors: by our kernels with arguments made before, where they compute a batch."""

    call: AttentionCall
    kv_cache: KVCache
    rotation: BoundRotation | None
    attention: BoundAttention | None  # None: the kernels compute no batch

    @classmethod
    def of(cls, call: AttentionCall, kv_cache: KVCache) -> _Launch:
        """Bind the kernels, as far as they are there and compute this layer."""
        rotation = None if call.rotary is None else bind_rotation(call.query, call.key, call.rotary)
        if (rotation is None and call.rotary is not None) or not _is_plain(call, kv_cache):
            return cls(call, kv_cache, None, None)
        key = call.key if rotation is None else rotation.key
        return cls(call, kv_cache, rotation, _bound(call, call.query, key, kv_cache))

    def __call__(self, metadata: AttentionMetadata) -> None:
        """Run the layer with the batch of `metadata`."""
        assert isinstance(metadata, SdpaMetadata), type(metadata)
        if self.attention is None or not metadata.is_one_query_each:
            SdpaImpl().forward(self.call, self.kv_cache, metadata)
            return
        if self.rotation is not None:
            self.rotation.run()
        _attend_at_once(self.attention, self.call, metadata)


def _decode(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, kv_cache: KVCache, metadata: SdpaMetadata
) -> bool:
    """Run one layer of a step in which each request has one query by our C++ kernel, and return whether it ran."""
    attention = _bound(call, query, key, kv_cache) if _is_plain(call, kv_cache) else None
    if attention is not None:
        _attend_at_once(attention, call, metadata)
    return attention is not None


def _is_plain(call: AttentionCall, kv_cache: KVCache) -> bool:
    """Return whether our C++ kernel has all that changes the scores of a layer."""
    return not (kv_cache.scales is not None or call.softcap or call.sinks is not None or call.slopes is not None)


def _bound(call: AttentionCall, query: torch.Tensor, key: torch.Tensor, kv_cache: KVCache) -> BoundAttention | None:
    value, values = (None, kv_cache.key) if call.is_latent else (call.value, kv_cache.value)
    return bind_attention(query, key, value, kv_cache.key, values, call.out, call.scale)


def _attend_at_once(attention: BoundAttention, call: AttentionCall, metadata: SdpaMetadata) -> None:
    """Run the kernel for a batch of one query each; rows of padding become zero."""
    view = metadata.calls[0].key_views[call.reach]
    assert view.num_keys is not None
    attention.run(metadata.write_slots, view.slots, view.num_keys)
    if len(call.out) != metadata.num_real_rows:
        call.out[metadata.num_real_rows :].zero_()


def _bias(call: AttentionCall, view: KeyView) -> torch.Tensor:
    """Return the bias of the keys of a call, `[num_reqs, num_q_heads, 1, num_keys]` float32."""
    assert call.slopes is not None and view.positions is not None, "the builder knew of no bias by position"
    return position_bias(call.slopes, call.slope_scale, view.positions).unsqueeze(2)


def _by_slot(cached: torch.Tensor) -> torch.Tensor:
    """Return a contiguous cache, `[num_blocks, block_size, heads, dim]`, as `[num_slots, heads, dim]`, else itself."""
    return cached.view(-1, *cached.shape[2:]) if cached.is_contiguous() else cached


def _write(
    cached: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor | None = None,
    run: range | None = None,
) -> None:
    """Write `rows` `[num_rows, heads, dim]` to `slots` of a cache of `_by_slot`.

    With a `scale` `[heads]`, rows are divided by it. A cache in e4m3 takes values beyond its range as its largest ones.
    `run`: the slots, if they follow one another.
    """
    if scale is not None:
        rows = rows / scale[:, None]
    if cached.dtype is torch.float8_e4m3fn:
        rows = rows.clamp(-MAX_E4M3, MAX_E4M3).to(cached.dtype).view(torch.uint8)
        cached = cached.view(torch.uint8)
    if cached.dim() == 4:  # blocks that share their memory with states
        cached[slots // cached.shape[1], slots % cached.shape[1]] = rows.to(cached.dtype)
    elif run is None:
        cached.index_copy_(0, slots, rows.to(cached.dtype))
    else:
        cached[run.start : run.stop].copy_(rows)


def _read(cached: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, run: range | None = None) -> torch.Tensor:
    """Return the tokens at `slots` `[num_reqs, num_keys]` of a cache of `_by_slot`, `[num_reqs, num_keys, heads, dim]`.

    `run`: the slots of one request, if they follow one another: the tokens are the cache's own memory then. Those of a
    cache in e4m3 are converted to `dtype`; NaN stays NaN, as in a cache of `dtype`.
    """
    if cached.dtype is torch.float8_e4m3fn:
        bits = _read(cached.view(torch.uint8), slots, dtype, run)
        numbers = e4m3_to_bfloat16(bits)
        return numbers.masked_fill_((bits & 0x7F) == 0x7F, float("nan")).to(dtype)
    if cached.dim() == 4:
        return cached[slots // cached.shape[1], slots % cached.shape[1]]
    if run is not None:
        return cached[run.start : run.stop].unsqueeze(0)
    found: torch.Tensor = cached.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    return found


def attend_one_query(
    query: torch.Tensor,  # [num_reqs, num_q_heads, key_dim]
    key: torch.Tensor,  # [num_reqs, num_kv_heads, num_keys, key_dim]
    value: torch.Tensor,  # [num_reqs, num_kv_heads, num_keys, value_dim]
    mask: torch.Tensor | None,  # [num_reqs, 1, 1, num_keys] bool
    scale: float,
) -> torch.Tensor:
    """Return attention of one query of each request, `[num_reqs, num_kv_heads, heads that share a key, value_dim]`.

    The heads that share a key are rows of one head, so that each key is read once; `enable_gqa` repeats keys.
    """
    together = query.view(query.shape[0], key.shape[1], -1, query.shape[2])
    return F.scaled_dot_product_attention(together, key, value, attn_mask=mask, scale=scale)


def attend(
    query: torch.Tensor,  # [num_reqs, num_q_heads, query_len, key_dim]
    key: torch.Tensor,  # [num_reqs, num_kv_heads, num_keys, key_dim]
    value: torch.Tensor,  # [num_reqs, num_kv_heads, num_keys, value_dim]
    view: KeyView,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,  # [num_reqs, num_q_heads, 1, num_keys] float32
) -> torch.Tensor:
    """Return attention over dense keys, `[num_reqs, num_q_heads, query_len, value_dim]`."""
    groups = query.shape[1] // key.shape[1]
    if not softcap and sinks is None and bias is None:
        if query.shape[2] > QUERY_BLOCK and query.device.type == "cpu":
            return _attend_in_blocks(query, key, value, view, scale)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=view.mask, is_causal=view.is_causal, scale=scale, enable_gqa=groups > 1
        )
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if view.is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    elif view.mask is not None:
        scores = scores.masked_fill(~view.mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    # A sink is one more key whose value is zero: it only takes weight away.
    sink_scores = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    weights = torch.cat([scores, sink_scores], dim=-1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value


def _attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, view: KeyView, scale: float
) -> torch.Tensor:
    """Return the attention of one request's queries, each block over the keys up to its last query's."""
    assert view.mask is not None, "the last of several queries alone sees the last key"
    num_before = key.shape[2] - query.shape[2]
    blocks = []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, query.shape[2])
        keys = slice(0, num_before + end)
        blocks.append(
            F.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, keys],
                value[:, :, keys],
                attn_mask=view.mask[:, :, start:end, keys],
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(blocks, dim=2)
