"""The tensors at fixed addresses that hold every step's inputs, over which graphs are captured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch

from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, AttentionMetadata, HostBatch
from piecegraph.runner.attention.interface.step_metadata import StepMetadata
from piecegraph.runner.device_memory.host_memory.host_copy import to_device


class InputBuffers:
    """The input tensors of all steps, allocated once.

    The host writes `idx_mapping` and `query_start_loc`, with one copy per batch; `prepare_inputs` derives the other
    tensors on the device.
    """

    def __init__(
        self, *, max_num_tokens: int, max_num_reqs: int, max_blocks: int, device: torch.device, num_groups: int = 1
    ) -> None:
        """Allocate the buffers; `max_blocks` counts kernel blocks in each of a request's `num_groups` block tables."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def of_groups(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            """Return zeros `[num_groups, *shape]` whose groups start at 16-byte boundaries, as kernels assume."""
            size = prod(shape)
            return zeros(num_groups, -(-size // 4) * 4, dtype=dtype)[:, :size].view(num_groups, *shape)

        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.num_groups = num_groups
        self._first_query_start = -(-max_num_reqs // 4) * 4  # kernels are specialised on 16-byte alignment
        self._from_host = zeros(self._first_query_start + max_num_reqs + 1)
        self._last_filled: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.idx_mapping = self._from_host[:max_num_reqs]  # [max_num_reqs]: batch order -> state row; -1: padding
        self.query_start_loc = self._from_host[self._first_query_start :]  # [max_num_reqs + 1]
        self.input_ids = zeros(max_num_tokens, dtype=torch.int64)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.slot_mapping = of_groups(max_num_tokens, dtype=torch.int64)  # [num_groups, max_num_tokens]
        self.seq_lens = zeros(max_num_reqs)
        self.block_table = of_groups(max_num_reqs, max_blocks)  # [num_groups, max_num_reqs, max_blocks]
        self.logits_indices = zeros(max_num_reqs, dtype=torch.int64)  # the last row of each request

    def fill(self, rows: Sequence[int], query_lens: Sequence[int]) -> None:
        """Write the state row and the number of tokens of each request of a batch to the device.

        A batch equal to the preceding one costs nothing.
        """
        assert len(rows) == len(query_lens) <= self.max_num_reqs, (len(rows), len(query_lens))
        batch = (tuple(rows), tuple(query_lens))
        if batch == self._last_filled:
            return
        starts = [0]
        for query_len in query_lens:
            starts.append(starts[-1] + query_len)
        assert starts[-1] <= self.max_num_tokens, (starts[-1], self.max_num_tokens)
        self._last_filled = None  # until the copy is launched, in case an interrupt prevents the launch
        unused = self.max_num_reqs - len(rows)
        gap = self._first_query_start - self.max_num_reqs
        values = [*rows, *[-1] * (unused + gap), *starts, *[starts[-1]] * unused]
        self._from_host.copy_(to_device(values, torch.int32, self._from_host.device), non_blocking=True)
        self._last_filled = batch

    def metadata(
        self,
        *,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        num_decode_reqs: int,
        hosts: Sequence[HostBatch] | None = None,
    ) -> StepMetadata:
        """Return the attention metadata of the batch in these buffers for each group of layers.

        Counts include padding. `hosts`: the same metadata on the host, one per group, for backends that plan there.
        """
        assert hosts is None or len(hosts) == self.num_groups, f"{len(hosts)} hosts; {self.num_groups} groups"
        query_start_loc, seq_lens = self.query_start_loc[: num_reqs + 1], self.seq_lens[:num_reqs]
        groups = [
            AttentionMetadata(
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                max_query_len=max_query_len,
                num_decode_reqs=num_decode_reqs,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=self.block_table[group, :num_reqs],
                slot_mapping=self.slot_mapping[group, :num_tokens],
                host=None if hosts is None else hosts[group],
            )
            for group in range(self.num_groups)
        ]
        return StepMetadata(tuple(groups))

    def poison(self) -> None:
        """Overwrite everything that `prepare_inputs` derives with 0x7f bytes, for tests of what it must overwrite."""
        for derived in (
            self.input_ids,
            self.positions,
            self.slot_mapping,
            self.seq_lens,
            self.block_table,
            self.logits_indices,
        ):
            derived.view(torch.uint8).fill_(0x7F)


def dummy_batch(
    buffers: InputBuffers, *, num_tokens: int, max_model_len: int, with_host_batch: bool = False
) -> StepMetadata:
    """Fill `buffers` with a batch of dummy tokens, for warm-up and capture, and return its metadata.

    The batch runs every kernel that a real batch of its size runs, and writes nothing to the KV cache. The
    `num_tokens` tokens belong to new requests without state rows, as few as can hold them; tokens that do not fit into
    all requests together are padding. `prepare_inputs` must run before attention: it gives them PAD_SLOT_ID.
    """
    lens = [max_model_len] * (num_tokens // max_model_len)
    lens += [num_tokens % max_model_len] if num_tokens % max_model_len else []
    lens = lens[: buffers.max_num_reqs]
    num_reqs = len(lens)
    buffers.fill([-1] * num_reqs, lens)
    hosts = None
    if with_host_batch:
        host = HostBatch(
            query_start_loc=(0, *accumulate(lens)),
            seq_lens=tuple(lens),
            block_table=torch.zeros((num_reqs, buffers.block_table.shape[2]), dtype=torch.int64),
            slot_mapping=torch.full((num_tokens,), PAD_SLOT_ID, dtype=torch.int64),
        )
        hosts = [host] * buffers.num_groups
    is_decode = lens == [1]
    return buffers.metadata(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=max(lens),
        num_decode_reqs=1 if is_decode else 0,
        hosts=hosts,
    )
