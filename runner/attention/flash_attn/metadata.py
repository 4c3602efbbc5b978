"""The metadata of flash-attn's kernels: a step's decode requests, and all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from piecegraph.runner.attention.flash_attn.choice import FlashAttnKernels
from piecegraph.runner.attention.flash_attn.kernels import DecodeBatch, RaggedBatch
from piecegraph.runner.attention.flash_attn.packages import Family
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.triton.metadata import TritonMetadata, TritonMetadataBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttnMetadata(AttentionMetadata):
    """A step's batch, divided. At most one of `decode` and `triton_decode` is set, neither where no request decodes."""

    decode: DecodeBatch | None
    triton_decode: TritonMetadata | None  # the decode requests as a batch for our kernel, which writes K/V itself
    prefill: RaggedBatch | None
    write_from: int  # keys and values of rows from here on are to be written; num_tokens: none
    slot_mapping_address: int  # `data_ptr()`, read once a step and not once a layer


@dataclass(frozen=True, slots=True)
class FlashAttnMetadataBuilder:
    """A builder of views of the batch's tensors: in a graph they see what a replay puts into the fixed buffers."""

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
        """Return a builder; allocates a workspace only if our own kernel decodes."""
        if kernels.decode is not Family.TRITON:
            return cls(kernels, None)
        return cls(kernels, TritonMetadataBuilder.allocate(layers, block_size, device, max_num_reqs))

    def build(self, common: AttentionMetadata) -> FlashAttnMetadata:
        """Return this step's metadata. Copies nothing."""
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
        """Return what `build` does: everything that a graph freezes follows from `max_query_len` and from shapes."""
        return self.build(common)

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        """Do nothing: the only buffer is our decode kernel's workspace, which each launch leaves as it found it."""


def _decode_requests(common: AttentionMetadata) -> AttentionMetadata:
    """Return the batch of the decode requests alone."""
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
