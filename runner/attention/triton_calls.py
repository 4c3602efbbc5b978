"""Which kernels a batch takes, and their launches: as Triton does it, or prepared once for fixed tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from piecegraph.runner.attention.kernels.decode import decode_call, decode_grid
from piecegraph.runner.attention.kernels.decode_config import DecodeConfig, decode_config
from piecegraph.runner.attention.kernels.gpu_limits import GpuLimits
from piecegraph.runner.attention.kernels.head_shape import HeadShape
from piecegraph.runner.attention.kernels.kv_write import kv_write_call, kv_write_grid
from piecegraph.runner.attention.kernels.launch import Grid, KernelCall, KernelPreparer, current_stream
from piecegraph.runner.attention.kernels.prefill import prefill_call, prefill_grid
from piecegraph.runner.attention.kernels.prefill_config import LONG_QUERY_LEN, PrefillConfig, prefill_config
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.triton_metadata import TritonMetadata
from piecegraph.runner.kv_cache import KVCache


class LayerCall(NamedTuple):
    """One layer's call, except for the batch."""

    query: torch.Tensor  # [num_tokens, num_q_heads, key_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    out: torch.Tensor  # [num_tokens, num_q_heads, value_dim], written
    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None  # [num_q_heads]
    kv_cache: KVCache

    @property
    def shape(self) -> HeadShape:
        return HeadShape.of(self.query, self.value)

    def decode(self, metadata: TritonMetadata, num_reqs: int, config: DecodeConfig) -> KernelCall:
        assert metadata.workspace is not None
        return decode_call(
            self.query,
            self.key,
            self.value,
            self.out,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            kv_cache=self.kv_cache,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            slot_mapping=metadata.slot_mapping,
            num_reqs=num_reqs,
            workspace=metadata.workspace,
            config=config,
        )

    def kv_write(self, metadata: TritonMetadata) -> KernelCall:
        return kv_write_call(
            self.key,
            self.value,
            kv_cache=self.kv_cache,
            slot_mapping=metadata.slot_mapping,
            first_row=metadata.num_decode_reqs,
            num_tokens=metadata.num_tokens,
        )

    def prefill(self, metadata: TritonMetadata, config: PrefillConfig) -> KernelCall:
        return prefill_call(
            self.query,
            self.out,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            kv_cache=self.kv_cache,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            first_req=metadata.num_decode_reqs,
            num_reqs=metadata.num_reqs,
            num_rows=metadata.num_tokens - metadata.num_decode_reqs,
            config=config,
        )


def kernel_calls(call: LayerCall, metadata: TritonMetadata) -> Iterator[KernelCall]:
    """What the batch takes, in order. Decode requests and all others share no row and no slot."""
    assert metadata.gpu is not None
    shape, num_decode_reqs = call.shape, metadata.num_decode_reqs
    if num_decode_reqs > 0:
        config = decode_config(shape, num_reqs=num_decode_reqs, max_len=metadata.max_len, num_sms=metadata.gpu.num_sms)
        yield call.decode(metadata, num_decode_reqs, config)
    if num_decode_reqs < metadata.num_reqs:
        yield call.kv_write(metadata)
        yield call.prefill(
            metadata,
            prefill_config(shape, max_query_len=metadata.max_query_len, shared_bytes=metadata.gpu.shared_bytes),
        )


class _Decode(NamedTuple):
    layout: int  # which of the kernels
    grid: Grid
    num_splits: int
    min_split_len: int


class _Plan(NamedTuple):
    """How any batch of one kind of heads is launched: the same for all layers and buckets."""

    decodes: tuple[_Decode, ...]  # by the number of requests, less one
    decode_layouts: tuple[tuple[int, DecodeConfig], ...]  # the fewest requests it is for, and the layout
    prefills: tuple[int, ...]  # by max_query_len: which of the layouts
    prefill_layouts: tuple[PrefillConfig, ...]


@lru_cache(maxsize=64)
def _plan(shape: HeadShape, max_num_reqs: int, max_len: int, gpu: GpuLimits) -> _Plan:
    numbers: dict[object, int] = {}
    decodes: list[_Decode] = []
    decode_layouts: list[tuple[int, DecodeConfig]] = []
    for num_reqs in range(1, max_num_reqs + 1):
        config = decode_config(shape, num_reqs=num_reqs, max_len=max_len, num_sms=gpu.num_sms)
        if config.compiled_for not in numbers:
            numbers[config.compiled_for] = len(numbers)
            decode_layouts.append((num_reqs, config))
        grid = decode_grid(shape, num_reqs, config)
        decodes.append(_Decode(numbers[config.compiled_for], grid, config.num_splits, config.min_split_len))
    prefills = [
        prefill_config(shape, max_query_len=max_query_len, shared_bytes=gpu.shared_bytes)
        for max_query_len in range(LONG_QUERY_LEN + 1)
    ]
    prefill_layouts = tuple(dict.fromkeys(prefills))
    return _Plan(tuple(decodes), tuple(decode_layouts), tuple(map(prefill_layouts.index, prefills)), prefill_layouts)


class PreparedAttention:
    """`kernel_calls` for tensors that stay where they are: a launch costs a few microseconds of the host.

    Everything is compiled at the first launch, for any batch of as many rows, so that none after it compiles.
    """

    def __init__(self, call: LayerCall, preparer: KernelPreparer) -> None:
        self._unbound: tuple[LayerCall, KernelPreparer] | None = (call, preparer)
        self._shape = call.shape
        self._device = call.query.get_device()

    def __call__(self, metadata: AttentionMetadata) -> None:
        """Like `TritonImpl.forward`. Every call's metadata comes from one builder."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        if self._unbound is not None:
            self._bind(*self._unbound, metadata)
            self._unbound = None
        stream = current_stream(self._device)
        num_decode_reqs = metadata.num_decode_reqs
        block_table, block_table_stride = metadata.block_table_address, metadata.block_table_stride
        if num_decode_reqs > 0:
            decode = self._plan.decodes[num_decode_reqs - 1]
            self._decodes[decode.layout].launch(
                decode.grid, stream,
                block_table, metadata.seq_lens_address, metadata.slot_mapping_address, block_table_stride,
                decode.num_splits, decode.min_split_len,
            )  # fmt: skip
        if num_decode_reqs < metadata.num_reqs:
            num_rows = metadata.num_tokens - num_decode_reqs
            self._kv_write.launch(
                kv_write_grid(self._shape.num_kv_heads, num_rows), stream,
                metadata.slot_mapping_address, num_decode_reqs, metadata.num_tokens,
            )  # fmt: skip
            layout = self._plan.prefills[min(metadata.max_query_len, LONG_QUERY_LEN)]
            config = self._plan.prefill_layouts[layout]
            self._prefills[layout].launch(
                prefill_grid(self._shape, num_rows, metadata.num_reqs - num_decode_reqs, config), stream,
                metadata.query_start_loc_address, metadata.seq_lens_address, block_table, block_table_stride,
                num_decode_reqs, metadata.num_reqs,
            )  # fmt: skip

    def _bind(self, call: LayerCall, preparer: KernelPreparer, metadata: TritonMetadata) -> None:
        assert metadata.gpu is not None
        num_rows = call.query.shape[0]
        self._plan = _plan(self._shape, metadata.max_num_reqs, metadata.max_len, metadata.gpu)
        self._decodes = [
            preparer.prepare(
                call.decode(metadata, num_reqs, config),
                changing=(
                    "block_table", "seq_lens", "slot_mapping", "block_table_stride", "num_splits", "min_split_len",
                ),
            )
            for num_reqs, config in self._plan.decode_layouts
            if num_reqs <= num_rows
        ]  # fmt: skip
        self._kv_write = preparer.prepare(call.kv_write(metadata), changing=("slot_mapping", "first_row", "num_tokens"))
        self._prefills = [
            preparer.prepare(
                call.prefill(metadata, config),
                changing=(
                    "query_start_loc", "seq_lens", "block_table", "block_table_stride", "first_req", "num_reqs",
                ),
            )
            for config in self._plan.prefill_layouts
        ]  # fmt: skip
