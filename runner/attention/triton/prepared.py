"""Attention over tensors that keep their addresses: launched with next to no work on the host, or part of a graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import torch

from piecegraph.compiler.common.cuda_driver import last_captured_node
from piecegraph.compiler.graphs.replay.prepared_ops import Patch
from piecegraph.passes.kernels.common.overlapped import current_stream
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.triton.calls import LayerCall
from piecegraph.runner.attention.triton.graph_nodes import AttentionNodes, Launch, Launches, Node
from piecegraph.runner.attention.triton.kernels.kv_write import kv_write_layout
from piecegraph.runner.attention.triton.kernels.launch import KernelCall, KernelPreparer, PreparedKernel
from piecegraph.runner.attention.triton.kernels.prefill import prefill_grid
from piecegraph.runner.attention.triton.launch_plan import LaunchPlan, launch_plan
from piecegraph.runner.attention.triton.layouts.prefill_config import LONG_QUERY_LEN
from piecegraph.runner.attention.triton.metadata import TritonMetadata

CHANGES = {
    "decode": (
        "block_table", "seq_lens", "slot_mapping", "block_table_stride", "num_reqs", "num_splits", "min_split_len",
        "few_splits",
    ),
    "prefill": ("query_start_loc", "seq_lens", "block_table", "block_table_stride", "first_req", "num_reqs"),
    "kv_write": ("slot_mapping", "first_query", "num_tokens", "heads"),
}  # fmt: skip
"""Arguments of each kernel that differ from batch to batch, in the order in which a launch passes them."""


class _Kernels:
    """One layer's kernels, each prepared when it is first needed: the batches of a graph take few of a dozen."""

    def __init__(self, layer: LayerCall, preparer: KernelPreparer, plan: LaunchPlan, metadata: TritonMetadata) -> None:
        self._layer = layer
        self._preparer = preparer
        self._plan = plan
        self._metadata = metadata  # of any batch: what differs is passed to each launch
        self._prepared: dict[tuple[str, int], PreparedKernel] = {}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor | None]:
        return self._layer.tensors(self._metadata)

    @cached_property
    def _kind(self) -> Hashable:
        return self._layer.kind(self._tensors)

    def decode(self, layout: int) -> PreparedKernel:
        return self._get("decode", layout)

    def prefill(self, layout: int) -> PreparedKernel:
        return self._get("prefill", layout)

    def kv_write(self) -> PreparedKernel:
        return self._get("kv_write", 0)

    def prepare_all(self) -> list[PreparedKernel]:
        """Prepare all kernels that a batch of as many rows may take; compiles in parallel what has to be compiled."""
        num_rows = self._layer.call.query.shape[0]
        names = [("decode", n) for n, (fewest, _) in enumerate(self._plan.decode_layouts) if fewest <= num_rows]
        names += [("prefill", n) for n in range(len(self._plan.prefill_layouts))]
        names.append(("kv_write", 0))
        kernels = self._preparer.prepare_all([self._call(*name) for name in names])
        self._prepared.update(zip(names, kernels, strict=True))
        return kernels

    def _get(self, kernel: str, layout: int) -> PreparedKernel:
        prepared = self._prepared.get((kernel, layout))
        if prepared is None:
            prepared = self._preparer.prepare_alike(
                (kernel, self._layout(kernel, layout), self._kind),
                self._tensors,
                lambda: self._call(kernel, layout)[0],
                CHANGES[kernel],
            )
            self._prepared[kernel, layout] = prepared
        return prepared

    def _layout(self, kernel: str, layout: int) -> Hashable:
        """Return what a layout's number stands for; numbers of two plans may differ."""
        if kernel == "kv_write":
            return None
        return self._plan.decode_layouts[layout] if kernel == "decode" else self._plan.prefill_layouts[layout]

    def _call(self, kernel: str, layout: int) -> tuple[KernelCall, Sequence[str]]:
        """Return a call of the kernel, and the names of the arguments that each launch passes."""
        if kernel == "decode":
            call = self._layer.decode(self._metadata, *self._plan.decode_layouts[layout])
        elif kernel == "prefill":
            call = self._layer.prefill(self._metadata, self._plan.prefill_layouts[layout])
        else:
            call = self._layer.kv_write(self._metadata)
        return call, CHANGES[kernel]


class PreparedAttention:
    """`kernel_calls` for tensors that keep their addresses: a launch takes a few microseconds of the host.

    Everything is compiled at the first launch, for any batch of as many rows, so that no later launch compiles. The
    layer can be part of a graph instead (`PatchableLaunch`), where nodes of kernels that the current batch does not
    take are disabled.
    """

    def __init__(self, layer: LayerCall, preparer: KernelPreparer) -> None:
        """`layer`: a layer's call and cache. `preparer`: shared by all layers and buckets."""
        self._layer = layer
        self._preparer = preparer
        self._shape = layer.shape
        self._rotary = layer.call.rotary
        self._num_rows = layer.call.query.shape[0]
        self._device = layer.call.query.get_device()
        self._plan: LaunchPlan | None = None
        self._kernels: _Kernels | None = None
        self._all: list[PreparedKernel] | None = None  # None: not all of the kernels are known to be compiled
        self._launches_key: tuple[int, ...] | None = None  # the batch of `_launches`
        self._launches: Launches = (None, None, None)

    def __call__(self, metadata: AttentionMetadata) -> None:
        """Run the layer as `TritonImpl.forward` does. The metadata of all calls comes from one builder."""
        metadata = self._bind(metadata)
        if self._all is None:
            assert self._kernels is not None
            self._all = self._kernels.prepare_all()
        stream = current_stream(self._device)
        for launch in self.launches(metadata):
            if launch is not None:
                launch.kernel.launch(launch.grid, stream, *launch.changed)

    def launches(self, metadata: TritonMetadata) -> Launches:
        """Return the launches of a batch; those of the last batch are kept."""
        if metadata.launch_key != self._launches_key:
            self._launches_key = None  # until both are of this batch
            self._launches = self._launches_of(metadata)
            self._launches_key = metadata.launch_key
        return self._launches

    def _launches_of(self, metadata: TritonMetadata) -> Launches:
        num_decode_reqs, num_reqs = metadata.num_decode_reqs, metadata.num_reqs
        return (
            self._kv_write(metadata) if num_decode_reqs < num_reqs else None,
            self._prefill(metadata) if num_decode_reqs < num_reqs else None,
            self._decode(metadata) if num_decode_reqs > 0 else None,
        )

    def unpatchable_reason(self) -> str | None:
        """Return why the kernels cannot be part of a graph, or None. Must follow the first call."""
        assert self._all is not None, "unpatchable_reason must follow the first call"
        return next(filter(None, (kernel.unpatchable_reason for kernel in self._all)), None)

    def record(self, metadata: AttentionMetadata) -> Patch:
        """Add a node for each kernel that some batch takes to the graph that is being captured; return their patch.

        Calls of the same kind were launched before, so nothing is compiled now, nor when a node becomes another kernel;
        a kernel that no batch took before is prepared then.

        A batch of decode requests only has a node of its own, if such a batch can have as few rows: that node's
        neighbours are the preceding and the following kernel of the model, and only so do the three overlap
        (`passes/kernels/common/overlapped.py`). A disabled node is waited for as if it ran, so the nodes of all other
        batches are on a parallel branch.
        """
        metadata = self._bind(metadata)
        one_decode = replace(metadata, num_reqs=1, num_decode_reqs=1, max_query_len=1)
        one_other = replace(metadata, num_reqs=1, num_decode_reqs=0, max_query_len=1)
        mixed = (self._kv_write(one_other), self._prefill(one_other), self._decode(one_decode))
        if self._num_rows > metadata.max_num_reqs:
            return AttentionNodes(self.launches, [self._record(launch) for launch in mixed], None)
        main = torch.cuda.current_stream(self._device)
        side = next(stream for stream in _side_streams(self._device) if stream != main)
        side.wait_stream(main)
        try:
            decode = self._record(self._decode(one_decode))
            with torch.cuda.stream(side):
                nodes = [self._record(launch) for launch in mixed]
        finally:
            main.wait_stream(side)  # also after an error: a capture cannot end while a branch is open
        return AttentionNodes(self.launches, nodes, decode)

    def _record(self, launch: Launch) -> Node:
        stream = current_stream(self._device)
        launch.kernel.launch(launch.grid, stream, *launch.changed)
        return Node(last_captured_node(stream))

    def _decode(self, metadata: TritonMetadata) -> Launch:
        assert self._plan is not None and self._kernels is not None
        decode = self._plan.decodes[metadata.num_decode_reqs - 1]
        changed = (
            metadata.block_table_address, metadata.seq_lens_address, metadata.slot_mapping_address,
            metadata.block_table_stride, decode.num_reqs, decode.num_splits, decode.min_split_len,
            decode.few_splits,
        )  # fmt: skip
        return Launch(self._kernels.decode(decode.layout), decode.grid, changed)

    def _kv_write(self, metadata: TritonMetadata) -> Launch:
        assert self._kernels is not None
        num_decode_reqs, num_tokens = metadata.num_decode_reqs, metadata.num_tokens
        layout = kv_write_layout(self._shape, num_tokens, self._rotary)
        changed = (metadata.slot_mapping_address, num_decode_reqs, num_tokens, layout.heads)
        return Launch(self._kernels.kv_write(), layout.grid, changed)

    def _prefill(self, metadata: TritonMetadata) -> Launch:
        assert self._plan is not None and self._kernels is not None
        num_decode_reqs, num_reqs = metadata.num_decode_reqs, metadata.num_reqs
        layout = self._plan.prefills[min(metadata.max_query_len, LONG_QUERY_LEN)]
        config = self._plan.prefill_layouts[layout]
        num_rows = metadata.num_tokens - num_decode_reqs
        changed = (
            metadata.query_start_loc_address, metadata.seq_lens_address, metadata.block_table_address,
            metadata.block_table_stride, num_decode_reqs, num_reqs,
        )  # fmt: skip
        assert metadata.gpu is not None
        bounds = {"max_len": metadata.max_len, "num_sms": metadata.gpu.num_sms}
        grid = prefill_grid(self._shape, num_rows, num_reqs - num_decode_reqs, config, **bounds)
        return Launch(self._kernels.prefill(layout), grid, changed)

    def _bind(self, metadata: AttentionMetadata) -> TritonMetadata:
        """Make the launch plan at the first batch; return `metadata` under its type."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        if self._kernels is None:
            assert metadata.gpu is not None
            self._plan = launch_plan(self._shape, metadata.max_num_reqs, metadata.max_len, metadata.gpu)
            self._kernels = _Kernels(self._layer, self._preparer, self._plan, metadata)
        return metadata


@lru_cache(maxsize=16)
def _side_streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return two streams: torch has a few dozen, given out in turns, so one of two may be that of the capture."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
