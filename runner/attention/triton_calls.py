"""Which kernels a batch takes, and their launches: as Triton does it, or prepared once for fixed tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from piecegraph.runner.attention.kernels.decode import decode_call, decode_grid
from piecegraph.runner.attention.kernels.decode_config import DecodeConfig, decode_config
from piecegraph.runner.attention.kernels.head_shape import HeadShape
from piecegraph.runner.attention.kernels.kv_write import kv_write_call, kv_write_grid
from piecegraph.runner.attention.kernels.launch import Grid, KernelCall, PreparedKernel, current_stream
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


class _PreparedDecode(NamedTuple):
    kernel: PreparedKernel
    grid: Grid
    num_splits: int
    min_split_len: int


class _PreparedPrefill(NamedTuple):
    kernel: PreparedKernel
    config: PrefillConfig


class PreparedAttention:
    """`kernel_calls` for tensors that stay where they are: a launch costs a few microseconds of the host.

    Everything is compiled at the first launch, for any batch of as many rows, so that none after it compiles.
    """

    def __init__(self, call: LayerCall) -> None:
        self._call: LayerCall | None = call
        self._shape = call.shape
        self._num_rows = call.query.shape[0]
        self._device = call.query.get_device()

    def __call__(self, metadata: AttentionMetadata) -> None:
        """Like `TritonImpl.forward`. Every call's metadata comes from one builder."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        if self._call is not None:
            self._bind(self._call, metadata)
            self._call = None
        stream = current_stream(self._device)
        num_decode_reqs = metadata.num_decode_reqs
        block_table, block_table_stride = metadata.block_table_address, metadata.block_table_stride
        if num_decode_reqs > 0:
            decode = self._decodes[num_decode_reqs - 1]
            decode.kernel.launch(
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
            prefill = self._prefills[min(metadata.max_query_len, LONG_QUERY_LEN)]
            prefill.kernel.launch(
                prefill_grid(self._shape, num_rows, metadata.num_reqs - num_decode_reqs, prefill.config), stream,
                metadata.query_start_loc_address, metadata.seq_lens_address, block_table, block_table_stride,
                num_decode_reqs, metadata.num_reqs,
            )  # fmt: skip

    def _bind(self, call: LayerCall, metadata: TritonMetadata) -> None:
        assert metadata.gpu is not None
        decodes: dict[tuple[object, ...], PreparedKernel] = {}
        self._decodes: list[_PreparedDecode] = []  # by the number of requests, less one
        for num_reqs in range(1, min(self._num_rows, metadata.max_num_reqs) + 1):
            layout = decode_config(
                self._shape, num_reqs=num_reqs, max_len=metadata.max_len, num_sms=metadata.gpu.num_sms
            )
            if layout.compiled_for not in decodes:
                decodes[layout.compiled_for] = PreparedKernel(
                    call.decode(metadata, num_reqs, layout),
                    changing=(
                        "block_table", "seq_lens", "slot_mapping", "block_table_stride", "num_splits", "min_split_len",
                    ),
                )  # fmt: skip
            grid = decode_grid(self._shape, num_reqs, layout)
            kernel = decodes[layout.compiled_for]
            self._decodes.append(_PreparedDecode(kernel, grid, layout.num_splits, layout.min_split_len))
        self._kv_write = PreparedKernel(call.kv_write(metadata), changing=("slot_mapping", "first_row", "num_tokens"))
        prefills: dict[PrefillConfig, PreparedKernel] = {}
        self._prefills: list[_PreparedPrefill] = []  # by max_query_len
        for max_query_len in range(LONG_QUERY_LEN + 1):
            config = prefill_config(self._shape, max_query_len=max_query_len, shared_bytes=metadata.gpu.shared_bytes)
            if config not in prefills:
                prefills[config] = PreparedKernel(
                    call.prefill(metadata, config),
                    changing=(
                        "query_start_loc", "seq_lens", "block_table", "block_table_stride", "first_req", "num_reqs",
                    ),
                )  # fmt: skip
            self._prefills.append(_PreparedPrefill(prefills[config], config))
