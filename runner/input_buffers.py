"""The fixed-address tensors every step's inputs are in: what graphs are captured over."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from piecegraph.runner.attention.metadata import AttentionMetadata, HostBatch
from piecegraph.runner.attention.step_metadata import StepMetadata
from piecegraph.runner.host_copy import to_device


class InputBuffers:
    """Allocated once. The host writes `idx_mapping` and `query_start_loc`, in one copy a batch;
    `prepare_inputs` derives the rest on the device."""

    def __init__(
        self, *, max_num_tokens: int, max_num_reqs: int, max_blocks: int, device: torch.device, num_groups: int = 1
    ) -> None:
        """`max_blocks`: as kernels count them, in each of a request's `num_groups` block tables."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def of_groups(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            """Each group's part begins at a 16-byte boundary, which kernels may be compiled for."""
            size = prod(shape)
            return zeros(num_groups, -(-size // 4) * 4, dtype=dtype)[:, :size].view(num_groups, *shape)

        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.num_groups = num_groups
        self._first_query_start = -(-max_num_reqs // 4) * 4  # kernels like 16-byte boundaries
        self._from_host = zeros(self._first_query_start + max_num_reqs + 1)
        self._last_filled: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.idx_mapping = self._from_host[:max_num_reqs]  # [max_num_reqs]: batch order -> state row; -1: padding
        self.query_start_loc = self._from_host[self._first_query_start :]  # [max_num_reqs + 1]
        self.input_ids = zeros(max_num_tokens, dtype=torch.int64)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.slot_mapping = of_groups(max_num_tokens, dtype=torch.int64)  # [num_groups, max_num_tokens]
        self.seq_lens = zeros(max_num_reqs)
        self.block_table = of_groups(max_num_reqs, max_blocks)  # [num_groups, max_num_reqs, max_blocks]
        self.logits_indices = zeros(max_num_reqs, dtype=torch.int64)  # each request's last row

    def fill(self, rows: Sequence[int], query_lens: Sequence[int]) -> None:
        """Tell the device which state rows this batch has, and how many tokens each computes.

        A batch equal to the last one filled costs nothing.
        """
        assert len(rows) == len(query_lens) <= self.max_num_reqs, (len(rows), len(query_lens))
        batch = (tuple(rows), tuple(query_lens))
        if batch == self._last_filled:
            return
        starts = [0]
        for query_len in query_lens:
            starts.append(starts[-1] + query_len)
        assert starts[-1] <= self.max_num_tokens, (starts[-1], self.max_num_tokens)
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
        """The batch in these buffers, as attention in each group of layers sees it; counts include padding.

        `hosts`: the same as the host knows it, one a group, for backends that plan there.
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
        """Overwrite everything `prepare_inputs` derives with 0x7f bytes: for tests of what it must overwrite."""
        for derived in (
            self.input_ids,
            self.positions,
            self.slot_mapping,
            self.seq_lens,
            self.block_table,
            self.logits_indices,
        ):
            derived.view(torch.uint8).fill_(0x7F)
