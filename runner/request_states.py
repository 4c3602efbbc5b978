"""What the device keeps of each running request, in a row that is the request's until it ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.runner.host_copy import to_device


class RequestStates:
    """Permanent rows, apart from any step's batch: a step names its rows through `idx_mapping`.

    Kernels read and advance these tensors, so a decode step needs nothing from the host but the rows
    that take part. After Model Runner V2's `RequestState`.
    """

    def __init__(self, *, max_num_reqs: int, max_model_len: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.token_ids = zeros(max_num_reqs, max_model_len)  # [rows, max_model_len]: prompt, then what was sampled
        self.block_table = zeros(max_num_reqs, max_blocks)  # [rows, max_blocks]
        self.prompt_lens = zeros(max_num_reqs)  # [rows]: a step that ends before this samples nothing
        self.num_computed_tokens = zeros(max_num_reqs)  # [rows]: tokens whose key and value are cached
        self._free = list(reversed(range(max_num_reqs)))
        self._rows: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def row(self, request_id: str) -> int:
        """The row of a request that was added."""
        return self._rows[request_id]

    def add(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int], *, num_computed_tokens: int = 0
    ) -> int:
        """Give a request a row holding its tokens and blocks; the first `num_computed_tokens` are cached."""
        assert request_id not in self._rows, f"{request_id!r} has a row already"
        row = self._rows[request_id] = self._free.pop()
        _write(self.token_ids[row], token_ids)
        _write(self.block_table[row], block_ids)
        self.prompt_lens[row] = len(token_ids)
        self.num_computed_tokens[row] = num_computed_tokens
        return row

    def remove(self, request_id: str) -> None:
        """Free a request's row; harmless for one that never ran."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def clear(self) -> None:
        """Free all rows."""
        for request_id in tuple(self._rows):
            self.remove(request_id)


def _write(row: torch.Tensor, values: Sequence[int]) -> None:
    row[: len(values)].copy_(to_device(values, torch.int32, row.device), non_blocking=True)
