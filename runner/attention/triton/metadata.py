"""The metadata of our kernels, and its builder, which owns their workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.passes.kernels.common.gpu_limits import GpuLimits
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
from piecegraph.runner.attention.triton.layouts.decode_config import decode_config, num_head_blocks
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.layouts.prefill_config import MAX_SPLIT_ROWS, PROGRAMS_PER_SM


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMetadata(AttentionMetadata):
    """A step's batch with all that our kernels take. Addresses are `data_ptr()`, read once a step, not once a layer."""

    gpu: GpuLimits | None  # None on a CPU, where torch references run
    workspace: SplitWorkspace | None  # None on a CPU
    max_num_reqs: int  # the most requests of any batch
    max_len: int  # tokens a row of the block table can hold
    block_table_stride: int
    block_table_address: int
    query_start_loc_address: int
    seq_lens_address: int
    slot_mapping_address: int
    launch_key: tuple[int, ...]  # everything that launches depend on: equal for steps with equal launches


@dataclass(frozen=True, slots=True)
class TritonMetadataBuilder:
    """The builder of all layers. Layers and steps run one after the other, so they share the workspace."""

    block_size: int
    max_num_reqs: int
    gpu: GpuLimits | None
    workspace: SplitWorkspace | None

    @classmethod
    def allocate(
        cls, layers: Sequence[AttentionLayer], block_size: int, device: torch.device, max_num_reqs: int
    ) -> TritonMetadataBuilder:
        """Return a builder with a workspace for any batch of up to `max_num_reqs` requests."""
        if device.type == "cpu":
            return cls(block_size, max_num_reqs, None, None)
        gpu = GpuLimits.of(device)
        shapes = {head_shape(layer) for layer in layers}
        return cls(block_size, max_num_reqs, gpu, allocate_workspace(shapes, max_num_reqs, gpu, device))

    def build(self, common: AttentionMetadata) -> TritonMetadata:
        """Return this step's metadata. Computes and copies nothing: the kernels read the batch from its tensors."""
        addresses = [
            tensor.data_ptr()
            for tensor in (common.block_table, common.query_start_loc, common.seq_lens, common.slot_mapping)
        ]
        counts = (common.num_reqs, common.num_tokens, common.max_query_len, common.num_decode_reqs)
        return TritonMetadata(
            num_reqs=common.num_reqs,
            num_tokens=common.num_tokens,
            max_query_len=common.max_query_len,
            num_decode_reqs=common.num_decode_reqs,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            host=common.host,
            gpu=self.gpu,
            workspace=self.workspace,
            max_num_reqs=self.max_num_reqs,
            max_len=common.block_table.shape[1] * self.block_size,
            block_table_stride=common.block_table.stride(0),
            block_table_address=addresses[0],
            query_start_loc_address=addresses[1],
            seq_lens_address=addresses[2],
            slot_mapping_address=addresses[3],
            launch_key=(*counts, common.block_table.stride(0), *addresses),
        )

    def init_capture(self, common: AttentionMetadata) -> TritonMetadata:
        """Return what `build` does: grids depend on the bucket's counts, and the rest is read on the device."""
        return self.build(common)

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        """Do nothing: each launch leaves the workspace ready for the next."""


def head_shape(layer: AttentionLayer) -> HeadShape:
    """Return the shape of a layer's heads."""
    return HeadShape(
        num_q_heads=layer.num_q_heads,
        num_kv_heads=layer.num_kv_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        dtype=layer.dtype,
    )


def allocate_workspace(
    shapes: set[HeadShape], max_num_reqs: int, gpu: GpuLimits, device: torch.device
) -> SplitWorkspace:
    """Allocate a workspace for any launch of up to `max_num_reqs` requests with these heads."""
    num_split = PROGRAMS_PER_SM * gpu.num_sms  # programs that share keys in a launch of the prefill kernel, at most
    num_partials = num_split * MAX_SPLIT_ROWS
    num_values, num_counts = 1, num_split
    for shape in shapes:
        num_values = max(num_values, num_split * MAX_SPLIT_ROWS * shape.value_dim)
        num_counts = max(num_counts, max_num_reqs * num_head_blocks(shape))
        for num_reqs in range(1, max_num_reqs + 1):
            config = decode_config(
                shape, num_reqs=num_reqs, max_len=None, num_sms=gpu.num_sms, shared_bytes=gpu.shared_bytes
            )
            if config.num_splits > 1:
                partials = config.num_partials(num_reqs) * shape.num_q_heads
                num_partials = max(num_partials, partials)
                num_values = max(num_values, partials * shape.value_dim)
    return SplitWorkspace.allocate(
        num_partials=num_partials, num_values=num_values, num_counts=num_counts, device=device
    )
