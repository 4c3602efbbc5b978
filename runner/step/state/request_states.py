"""The states of running requests on the device, one row per request until the request ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from piecegraph.runner.common.token_record import TokenRecord
from piecegraph.runner.device_memory.staged_write import StagedWriteTensor
from piecegraph.runner.scheduling.scheduler_output import NewBlocks


class PreparedRows(Protocol):
    """The rows of requests that a step's inputs are derived from; see `RequestStates`."""

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens of each request, `[rows, max_model_len]` int32."""

    @property
    def num_computed_tokens(self) -> torch.Tensor:
        """The numbers of tokens before this step, `[rows]` int32."""

    @property
    def block_table(self) -> torch.Tensor:
        """The pages of each request, `[num_groups, rows, max_pages]` int32."""


class RequestStates:
    """The persistent rows of requests, independent of a step's batch, which selects rows through `idx_mapping`.

    Kernels read and advance these tensors, so a decode step needs nothing from the host but the rows that take part.
    Writes of the host are staged until `apply_writes`. The class follows Model Runner V2's `RequestState`.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_model_len: int,
        max_blocks: int,
        device: torch.device,
        num_groups: int = 1,
        pages_per_block: int = 1,
        keeps_host_blocks: bool = False,
        keeps_prefill_lens: bool = False,
    ) -> None:
        """Allocate the rows.

        Args:
            max_num_reqs: the number of rows.
            max_model_len: the largest number of tokens of a request.
            max_blocks: the largest number of allocated blocks of a request in each of its `num_groups` block tables.
            device: the device of the tensors.
            num_groups: the number of groups of layers, each of which has a block table per request.
            pages_per_block: the number of pages (the blocks that kernels see) in an allocated block. Block `b` is the
                pages from `b * pages_per_block` on; the tables hold pages.
            keeps_host_blocks: whether the host keeps each row's pages, too, for backends that plan there.
            keeps_prefill_lens: whether it keeps `prefill_lens`, too.
        """
        self._num_rows = max_num_reqs
        self._num_groups = num_groups
        self._pages_per_block = pages_per_block
        self._token_ids = StagedWriteTensor((max_num_reqs, max_model_len), torch.int32, device)
        # One tensor for all groups, so that a step's writes to all tables are one copy and one kernel.
        tables = (num_groups * max_num_reqs, max_blocks * pages_per_block)
        self._block_table = StagedWriteTensor(tables, torch.int32, device)
        self.block_table = self._block_table.gpu.unflatten(0, (num_groups, max_num_reqs))
        """The pages of each request, `[num_groups, rows, max_blocks * pages_per_block]` int32."""
        self._numbers = StagedWriteTensor((2, max_num_reqs), torch.int32, device)
        self._host_blocks: list[list[int]] | None = [[] for _ in range(tables[0])] if keeps_host_blocks else None
        self._host_prefill_lens: dict[str, int] | None = {} if keeps_prefill_lens else None
        self._free = list(reversed(range(max_num_reqs)))
        self._rows: dict[str, int] = {}

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens of each request, prompt first, `[rows, max_model_len]` int32."""
        return self._token_ids.gpu

    @property
    def prefill_lens(self) -> torch.Tensor:
        """The numbers of tokens known when each request was added, `[rows]` int32.

        A step that ends before them samples nothing.
        """
        return self._numbers.gpu[0]

    @property
    def num_computed_tokens(self) -> torch.Tensor:
        """The numbers of tokens whose keys and values are cached, `[rows]` int32."""
        return self._numbers.gpu[1]

    @property
    def token_record(self) -> TokenRecord:
        """The tensors in which sampling records its tokens."""
        return TokenRecord(self.token_ids, self.prefill_lens, self.num_computed_tokens)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all state tensors by name; their addresses never change."""
        names = ("token_ids", "block_table", "prefill_lens", "num_computed_tokens")
        return {name: getattr(self, name) for name in names}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def row(self, request_id: str) -> int:
        """Return the row of a request."""
        return self._rows[request_id]

    @property
    def keeps_prefill_lens(self) -> bool:
        """Whether `host_prefill_len` can be called."""
        return self._host_prefill_lens is not None

    def host_prefill_len(self, request_id: str) -> int:
        """Return the number of tokens that were known when a request was added; requires `keeps_prefill_lens`."""
        assert self._host_prefill_lens is not None, "keeps_prefill_lens was not asked for"
        return self._host_prefill_lens[request_id]

    def host_blocks(self, request_id: str, group: int = 0) -> Sequence[int]:
        """Return the pages of a request, in order; requires `keeps_host_blocks`."""
        assert self._host_blocks is not None, "keeps_host_blocks was not asked for"
        return self._host_blocks[self._table_row(request_id, group)]

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        *,
        num_computed_tokens: int = 0,
    ) -> int:
        """Assign a row to a request, stage its tokens and its blocks of each group, and return the row.

        The keys and values of the first `num_computed_tokens` tokens are cached already.
        """
        assert request_id not in self._rows, f"{request_id!r} has a row already"
        assert len(block_ids) == self._num_groups, f"blocks of {len(block_ids)} groups; there are {self._num_groups}"
        row = self._rows[request_id] = self._free.pop()
        self._token_ids.stage_write(row, 0, token_ids)
        self._numbers.stage_write(0, row, [len(token_ids)])
        self._numbers.stage_write(1, row, [num_computed_tokens])
        if self._host_prefill_lens is not None:
            self._host_prefill_lens[request_id] = len(token_ids)
        for group, blocks in enumerate(block_ids):
            self.add_blocks(request_id, 0, blocks, group)
        return row

    def add_blocks(self, request_id: str, start: int, block_ids: Sequence[int], group: int = 0) -> None:
        """Stage blocks for a request's table of a group, from the block `start` on."""
        row, ratio = self._table_row(request_id, group), self._pages_per_block
        if ratio > 1:
            start *= ratio
            block_ids = [block * ratio + page for block in block_ids for page in range(ratio)]
        if len(block_ids) > 0:
            self._block_table.stage_write(row, start, block_ids)
        if self._host_blocks is not None:
            self._host_blocks[row][start:] = block_ids

    def append_blocks(self, new_blocks: Sequence[NewBlocks]) -> None:
        """Do `add_blocks` for each of `new_blocks`, with a fast path for the single blocks of a decode step."""
        if self._pages_per_block > 1 or self._host_blocks is not None:
            for request_id, group, start, block_ids in new_blocks:
                self.add_blocks(request_id, start, block_ids, group)
            return
        rows, num_rows = self._rows, self._num_rows
        cells = {}
        for request_id, group, start, block_ids in new_blocks:
            if len(block_ids) == 1:
                cells[group * num_rows + rows[request_id], start] = block_ids[0]
            else:
                self.add_blocks(request_id, start, block_ids, group)
        self._block_table.stage_cells(cells)

    def record_tokens(self, tokens: Mapping[tuple[int, int], int]) -> None:
        """Stage tokens that another process has sampled, by row and place; those behind a row's end are dropped."""
        end = self.token_ids.shape[1]
        self._token_ids.stage_cells({place: token for place, token in tokens.items() if place[1] < end})

    def apply_writes(self) -> None:
        """Apply all staged writes to the device, before a step reads the tensors."""
        self._token_ids.apply_write()
        self._block_table.apply_write()
        self._numbers.apply_write()

    def remove(self, request_id: str) -> int | None:
        """Free a request's row and return it; return None if the request has no row."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            if self._host_prefill_lens is not None:
                self._host_prefill_lens.pop(request_id, None)
        return row

    def clear(self) -> None:
        """Free all rows, also those that an interrupted `add` has lost, and discard all staged writes."""
        self._rows = {}
        if self._host_prefill_lens is not None:
            self._host_prefill_lens = {}
        self._free = list(reversed(range(self._num_rows)))
        for staged in (self._token_ids, self._block_table, self._numbers):
            staged.clear_staged()

    def _table_row(self, request_id: str, group: int) -> int:
        assert 0 <= group < self._num_groups, f"group {group}; there are {self._num_groups}"
        return group * self._num_rows + self._rows[request_id]
