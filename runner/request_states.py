"""What the device keeps of each running request, in a row that is the request's until it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from piecegraph.runner.scheduling.scheduler_output import NewBlocks
from piecegraph.runner.staged_write import StagedWriteTensor
from piecegraph.runner.token_record import TokenRecord


class RequestStates:
    """Permanent rows, apart from any step's batch: a step names its rows through `idx_mapping`.

    Kernels read and advance these tensors, so a decode step needs nothing from the host but the rows
    that take part. What the host writes waits for `apply_writes`. After Model Runner V2's `RequestState`.
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
    ) -> None:
        """
        Args:
            max_blocks: of a request, in each of the `num_groups` block tables it has, one for each group of layers.
            pages_per_block: what kernels take for a block is one of so many pages of a block that is allocated.
                Block `b` is pages `b * pages_per_block` and those after it; tables hold pages.
            keeps_host_blocks: the host, too, knows each row's pages, for backends that plan there.
        """
        self._num_rows = max_num_reqs
        self._num_groups = num_groups
        self._pages_per_block = pages_per_block
        self._token_ids = StagedWriteTensor((max_num_reqs, max_model_len), torch.int32, device)
        # One tensor for all groups, so that a step's writes to all tables are one copy and one kernel.
        tables = (num_groups * max_num_reqs, max_blocks * pages_per_block)
        self._block_table = StagedWriteTensor(tables, torch.int32, device)
        self.block_table = self._block_table.gpu.unflatten(0, (num_groups, max_num_reqs))
        """`[num_groups, rows, max_blocks * pages_per_block]` int32, of pages."""
        self._numbers = StagedWriteTensor((2, max_num_reqs), torch.int32, device)
        self._host_blocks: list[list[int]] | None = [[] for _ in range(tables[0])] if keeps_host_blocks else None
        self._free = list(reversed(range(max_num_reqs)))
        self._rows: dict[str, int] = {}

    @property
    def token_ids(self) -> torch.Tensor:
        """`[rows, max_model_len]` int32: the prompt, then what was sampled."""
        return self._token_ids.gpu

    @property
    def prefill_lens(self) -> torch.Tensor:
        """`[rows]` int32: tokens known when the request was added; a step that ends before them samples nothing."""
        return self._numbers.gpu[0]

    @property
    def num_computed_tokens(self) -> torch.Tensor:
        """`[rows]` int32: tokens whose key and value are cached."""
        return self._numbers.gpu[1]

    @property
    def token_record(self) -> TokenRecord:
        """Where a draw leaves its tokens."""
        return TokenRecord(self.token_ids, self.prefill_lens, self.num_computed_tokens)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All of them, by name. They never move."""
        names = ("token_ids", "block_table", "prefill_lens", "num_computed_tokens")
        return {name: getattr(self, name) for name in names}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def row(self, request_id: str) -> int:
        """The row of a request that was added."""
        return self._rows[request_id]

    def host_blocks(self, request_id: str, group: int = 0) -> Sequence[int]:
        """The pages of a request, in order, if the host keeps them."""
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
        """Give a request a row holding its tokens, and its blocks of each group; the first `num_computed_tokens`
        are cached."""
        assert request_id not in self._rows, f"{request_id!r} has a row already"
        assert len(block_ids) == self._num_groups, f"blocks of {len(block_ids)} groups; there are {self._num_groups}"
        row = self._rows[request_id] = self._free.pop()
        self._token_ids.stage_write(row, 0, token_ids)
        self._numbers.stage_write(0, row, [len(token_ids)])
        self._numbers.stage_write(1, row, [num_computed_tokens])
        for group, blocks in enumerate(block_ids):
            self.add_blocks(request_id, 0, blocks, group)
        return row

    def add_blocks(self, request_id: str, start: int, block_ids: Sequence[int], group: int = 0) -> None:
        """Put blocks in a request's table of a group from the block `start` on."""
        row, ratio = self._table_row(request_id, group), self._pages_per_block
        if ratio > 1:
            start *= ratio
            block_ids = [block * ratio + page for block in block_ids for page in range(ratio)]
        if len(block_ids) > 0:
            self._block_table.stage_write(row, start, block_ids)
        if self._host_blocks is not None:
            self._host_blocks[row][start:] = block_ids

    def append_blocks(self, new_blocks: Sequence[NewBlocks]) -> None:
        """`add_blocks` for each, which in a step of decodes are blocks of one, all for other requests."""
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

    def apply_writes(self) -> None:
        """Bring what was staged to the device, before a step reads it."""
        self._token_ids.apply_write()
        self._block_table.apply_write()
        self._numbers.apply_write()

    def remove(self, request_id: str) -> int | None:
        """Free a request's row and return it; harmless for one that never ran."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def clear(self) -> None:
        """Free all rows, and forget what is staged for them."""
        for request_id in tuple(self._rows):
            self.remove(request_id)
        for staged in (self._token_ids, self._block_table, self._numbers):
            staged.clear_staged()

    def _table_row(self, request_id: str, group: int) -> int:
        assert 0 <= group < self._num_groups, f"group {group}; there are {self._num_groups}"
        return group * self._num_rows + self._rows[request_id]
