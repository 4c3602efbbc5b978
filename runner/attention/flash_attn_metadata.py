"""What flash-attn's kernels read of a step: its decode requests, and all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from piecegraph.runner.attention.flash_attn_choice import FlashAttnKernels
from piecegraph.runner.attention.flash_attn_kernels import DecodeBatch, RaggedBatch
from piecegraph.runner.attention.flash_attn_packages import Family
from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.triton_metadata import TritonMetadata, TritonMetadataBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttnMetadata(AttentionMetadata):
    """At most one of `decode` and `triton_decode` is there, and neither where no request decodes."""

    decode: DecodeBatch | None
    triton_decode: TritonMetadata | None  # a batch of the decode requests alone: our kernel's, which writes K/V itself
    prefill: RaggedBatch | None
    write_from: int  # keys and values of rows from here on are to be written; num_tokens: none
    slot_mapping_address: int  # `data_ptr()`, asked once a step and not once a layer


@dataclass(frozen=True, slots=True)
class FlashAttnMetadataBuilder:
    """All is views of the batch's tensors: under a graph they see what a replay puts into the fixed buffers."""

    kernels: FlashAttnKernels
    triton: TritonMetadataBuilder | None  # None where our kernel does not decode

    @classmethod
    def allocate(
        cls,
        kernels: FlashAttnKernels,
        layers: Sequence[AttentionLayer],
        block_size: int,
        device: torch.device,
        max_num_reqs: int,
    ) -> FlashAttnMetadataBuilder:
        if kernels.decode is not Family.TRITON:
            return cls(kernels, None)
        return cls(kernels, TritonMetadataBuilder.allocate(layers, block_size, device, max_num_reqs))

    def build(self, common: AttentionMetadata) -> FlashAttnMetadata:
        num_decode_reqs, num_reqs = common.num_decode_reqs, common.num_reqs
        decode, triton_decode, prefill = None, None, None
        if num_decode_reqs > 0 and self.triton is not None:
            triton_decode = self.triton.build(_decode_requests(common))
        elif num_decode_reqs > 0:
            decode = DecodeBatch(common.seq_lens[:num_decode_reqs], common.block_table[:num_decode_reqs])
        if num_decode_reqs < num_reqs:
            prefill = RaggedBatch(
                num_decode_reqs,
                common.max_query_len,
                common.query_start_loc[num_decode_reqs : num_reqs + 1],
                common.seq_lens[num_decode_reqs:num_reqs],
                common.block_table[num_decode_reqs:num_reqs],
            )
        if triton_decode is None:
            write_from = 0 if num_reqs > 0 else common.num_tokens
        else:
            write_from = num_decode_reqs if prefill is not None else common.num_tokens
        return FlashAttnMetadata(
            num_reqs=num_reqs,
            num_tokens=common.num_tokens,
            max_query_len=common.max_query_len,
            num_decode_reqs=num_decode_reqs,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            host=common.host,
            decode=decode,
            triton_decode=triton_decode,
            prefill=prefill,
            write_from=write_from,
            slot_mapping_address=common.slot_mapping.data_ptr(),
        )

    def init_capture(self, common: AttentionMetadata) -> FlashAttnMetadata:
        """The same: `max_query_len` is the bucket's, and the rest of what a graph freezes follows from shapes."""
        return self.build(common)

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        """Nothing: no buffer is ours but our decode kernel's workspace, which a launch leaves as it found it."""


def _decode_requests(common: AttentionMetadata) -> AttentionMetadata:
    """The batch that the decode requests of a batch are by themselves."""
    num_reqs = common.num_decode_reqs
    return replace(
        common,
        num_reqs=num_reqs,
        num_tokens=num_reqs,
        max_query_len=1,
        query_start_loc=common.query_start_loc[: num_reqs + 1],
        seq_lens=common.seq_lens[:num_reqs],
        block_table=common.block_table[:num_reqs],
        slot_mapping=common.slot_mapping[:num_reqs],
        host=None,
    )
