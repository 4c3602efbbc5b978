"""Which kernels a batch takes, and their launches: as Triton does it, or prepared once for fixed tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from piecegraph.compiler.graphs.cuda_driver import last_captured_node, set_enabled
from piecegraph.compiler.graphs.prepared_ops import Patch
from piecegraph.passes.kernels.gpu_limits import GpuLimits
from piecegraph.runner.attention.kernels.decode import decode_call, decode_grid
from piecegraph.runner.attention.kernels.decode_config import DecodeConfig, decode_config
from piecegraph.runner.attention.kernels.head_shape import HeadShape
from piecegraph.runner.attention.kernels.kv_write import kv_write_call, kv_write_layout
from piecegraph.runner.attention.kernels.launch import (
    Grid,
    KernelCall,
    KernelPreparer,
    PreparedKernel,
    current_stream,
)
from piecegraph.runner.attention.kernels.prefill import prefill_call, prefill_grid
from piecegraph.runner.attention.kernels.prefill_config import LONG_QUERY_LEN, PrefillConfig, prefill_config
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.rotary import Rotary
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
    rotary: Rotary | None = None  # what query and key still need

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
            rotary=self.rotary,
        )

    def kv_write(self, metadata: TritonMetadata) -> KernelCall:
        return kv_write_call(
            self.key,
            self.value,
            kv_cache=self.kv_cache,
            slot_mapping=metadata.slot_mapping,
            first_row=0,
            first_query=metadata.num_decode_reqs,
            num_tokens=metadata.num_tokens,
            query=self.query,
            rotary=self.rotary,
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
    """What the batch takes, in order. Decode requests and all others share no row of `out`.

    A request may read what another computes in this very step, where their tokens begin alike. So in a mixed batch
    all keys and values are written first. Decode comes last: the kernel after it may start while it still works
    (`passes/kernels/overlapped.py`), and it reads cached keys and values before the kernel ahead of it has ended,
    which must not be the one that writes them.
    """
    assert metadata.gpu is not None
    shape, num_decode_reqs = call.shape, metadata.num_decode_reqs
    if num_decode_reqs < metadata.num_reqs:
        yield call.kv_write(metadata)
        yield call.prefill(
            metadata,
            prefill_config(shape, max_query_len=metadata.max_query_len, shared_bytes=metadata.gpu.shared_bytes),
        )
    if num_decode_reqs > 0:
        config = decode_config(
            shape,
            num_reqs=num_decode_reqs,
            max_len=metadata.max_len,
            num_sms=metadata.gpu.num_sms,
            shared_bytes=metadata.gpu.shared_bytes,
            can_overlap=metadata.gpu.can_overlap,
        )
        yield call.decode(metadata, num_decode_reqs, config)


class _Decode(NamedTuple):
    layout: int  # which of the kernels
    grid: Grid
    num_reqs: int
    num_splits: int
    min_split_len: int
    few_splits: int


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
        config = decode_config(
            shape,
            num_reqs=num_reqs,
            max_len=max_len,
            num_sms=gpu.num_sms,
            shared_bytes=gpu.shared_bytes,
            can_overlap=gpu.can_overlap,
        )
        if config.compiled_for not in numbers:
            numbers[config.compiled_for] = len(numbers)
            decode_layouts.append((num_reqs, config))
        grid = decode_grid(shape, num_reqs, config)
        decodes.append(
            _Decode(
                numbers[config.compiled_for], grid, num_reqs, config.num_splits, config.min_split_len, config.few_splits
            )
        )
    prefills = [
        prefill_config(shape, max_query_len=max_query_len, shared_bytes=gpu.shared_bytes)
        for max_query_len in range(LONG_QUERY_LEN + 1)
    ]
    prefill_layouts = tuple(dict.fromkeys(prefills))
    return _Plan(tuple(decodes), tuple(decode_layouts), tuple(map(prefill_layouts.index, prefills)), prefill_layouts)


class _Launch(NamedTuple):
    """One kernel of a batch."""

    kernel: PreparedKernel
    grid: Grid
    changed: tuple[int, ...]


DECODE_CHANGES = (
    "block_table", "seq_lens", "slot_mapping", "block_table_stride", "num_reqs", "num_splits", "min_split_len",
    "few_splits",
)  # fmt: skip
PREFILL_CHANGES = ("query_start_loc", "seq_lens", "block_table", "block_table_stride", "first_req", "num_reqs")
KV_WRITE_CHANGES = ("slot_mapping", "first_query", "num_tokens", "heads")
"""Arguments of each kernel that differ from batch to batch, in the order a launch gives them."""


class PreparedAttention:
    """`kernel_calls` for tensors that stay where they are: a launch costs a few microseconds of the host.

    Everything is compiled at the first launch, for any batch of as many rows, so that none after it compiles.
    It can be part of a graph instead (`PatchableLaunch`): kernels no batch at hand takes are disabled there.
    """

    def __init__(self, call: LayerCall, preparer: KernelPreparer) -> None:
        self._unbound: tuple[LayerCall, KernelPreparer] | None = (call, preparer)
        self._shape = call.shape
        self._rotary = call.rotary
        self._device = call.query.get_device()

    def __call__(self, metadata: AttentionMetadata) -> None:
        """Like `TritonImpl.forward`. Every call's metadata comes from one builder."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        self.bind(metadata)
        stream = current_stream(self._device)
        for launch in self.launches(metadata):
            if launch is not None:
                launch.kernel.launch(launch.grid, stream, *launch.changed)

    def launches(self, metadata: TritonMetadata) -> tuple[_Launch | None, _Launch | None, _Launch | None]:
        """K/V write, prefill and decode, as they follow each other; None where no request takes it."""
        num_decode_reqs, num_reqs = metadata.num_decode_reqs, metadata.num_reqs
        return (
            self._kv_write(metadata) if num_decode_reqs < num_reqs else None,
            self._prefill(metadata) if num_decode_reqs < num_reqs else None,
            self._decode(metadata) if num_decode_reqs > 0 else None,
        )

    def unpatchable_reason(self) -> str | None:
        """Why its kernels cannot be part of a graph around it, or None."""
        kernels = (*self._decode_kernels, self._kv_write_kernel, *self._prefill_kernels)
        return next(filter(None, (kernel.unpatchable_reason for kernel in kernels)), None)

    def record(self, metadata: AttentionMetadata) -> Patch:
        """One node for each of the three kernels a batch may take."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        self.bind(metadata)
        stream = current_stream(self._device)
        one_decode = replace(metadata, num_reqs=1, num_decode_reqs=1, max_query_len=1)
        one_other = replace(metadata, num_reqs=1, num_decode_reqs=0, max_query_len=1)
        nodes = []
        for launch in (self._kv_write(one_other), self._prefill(one_other), self._decode(one_decode)):
            launch.kernel.launch(launch.grid, stream, *launch.changed)
            nodes.append(last_captured_node(stream))
        return _Nodes(self, nodes).patch

    def _decode(self, metadata: TritonMetadata) -> _Launch:
        decode = self._plan.decodes[metadata.num_decode_reqs - 1]
        changed = (
            metadata.block_table_address, metadata.seq_lens_address, metadata.slot_mapping_address,
            metadata.block_table_stride, decode.num_reqs, decode.num_splits, decode.min_split_len,
            decode.few_splits,
        )  # fmt: skip
        return _Launch(self._decode_kernels[decode.layout], decode.grid, changed)

    def _kv_write(self, metadata: TritonMetadata) -> _Launch:
        num_decode_reqs, num_tokens = metadata.num_decode_reqs, metadata.num_tokens
        layout = kv_write_layout(self._shape, num_tokens, self._rotary)
        changed = (metadata.slot_mapping_address, num_decode_reqs, num_tokens, layout.heads)
        return _Launch(self._kv_write_kernel, layout.grid, changed)

    def _prefill(self, metadata: TritonMetadata) -> _Launch:
        num_decode_reqs, num_reqs = metadata.num_decode_reqs, metadata.num_reqs
        layout = self._plan.prefills[min(metadata.max_query_len, LONG_QUERY_LEN)]
        config = self._plan.prefill_layouts[layout]
        num_rows = metadata.num_tokens - num_decode_reqs
        changed = (
            metadata.query_start_loc_address, metadata.seq_lens_address, metadata.block_table_address,
            metadata.block_table_stride, num_decode_reqs, num_reqs,
        )  # fmt: skip
        grid = prefill_grid(self._shape, num_rows, num_reqs - num_decode_reqs, config)
        return _Launch(self._prefill_kernels[layout], grid, changed)

    def bind(self, metadata: AttentionMetadata) -> None:
        """Have every kernel compiled that a batch of as many rows may take, for the tensors at hand. The first launch
        does, if nothing has before."""
        if self._unbound is None:
            return
        assert isinstance(metadata, TritonMetadata), type(metadata)
        call, preparer = self._unbound
        assert metadata.gpu is not None
        self._plan = plan = _plan(self._shape, metadata.max_num_reqs, metadata.max_len, metadata.gpu)
        num_rows = call.query.shape[0]
        layouts = [(num_reqs, config) for num_reqs, config in plan.decode_layouts if num_reqs <= num_rows]
        decodes = [(call.decode(metadata, num_reqs, config), DECODE_CHANGES) for num_reqs, config in layouts]
        prefills = [(call.prefill(metadata, config), PREFILL_CHANGES) for config in plan.prefill_layouts]
        kernels = preparer.prepare_all([*decodes, *prefills, (call.kv_write(metadata), KV_WRITE_CHANGES)])
        self._decode_kernels = kernels[: len(decodes)]
        self._prefill_kernels = kernels[len(decodes) : -1]
        self._kv_write_kernel = kernels[-1]
        self._unbound = None


class _Nodes:
    """A layer's kernels in a graph, and what they are set to."""

    def __init__(self, attention: PreparedAttention, nodes: Sequence[int]) -> None:
        self._attention = attention
        self._nodes = tuple(nodes)
        self._is_enabled = [True] * len(nodes)
        self._patched_for: tuple[int, ...] | None = None

    def patch(self, graph_exec: int, metadata: AttentionMetadata) -> None:
        """Costs the host next to nothing for a batch like the one before."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        if metadata.launch_key == self._patched_for:
            return
        self._patched_for = None  # until all of it is done
        for number, launch in enumerate(self._attention.launches(metadata)):
            node = self._nodes[number]
            if launch is not None:
                launch.kernel.patch(graph_exec, node, launch.grid, *launch.changed)
            if self._is_enabled[number] != (launch is not None):
                set_enabled(graph_exec, node, launch is not None)
                self._is_enabled[number] = launch is not None
        self._patched_for = metadata.launch_key
