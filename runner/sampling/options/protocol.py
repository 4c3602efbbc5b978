"""The interface of a sampler option: the requests that use it, its table on the device, and its change of logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.device_memory.host_memory.host_copy import to_device
from piecegraph.runner.sampling.options.staged_rows import StagedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRequest:
    """The parameters of a request that options read."""

    params: SamplingParams
    prompt_len: int
    stop_token_ids: Collection[int]  # all tokens that end its text, EOS tokens included
    bad_words: Sequence[Sequence[int]]  # token ids of each
    token_ids: Sequence[int] = ()  # all known tokens, the prompt's first; only logits processors read them


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The rows of logits of a step. All tensors are contiguous and on the device."""

    rows: Sequence[int]  # [num_reqs], on the host: state row of each row of logits, -1 for padding
    idx_mapping: torch.Tensor  # [num_reqs] int32, the same
    positions: torch.Tensor  # [num_reqs] int32, the positions of the drawn tokens
    token_ids: torch.Tensor  # [max_num_reqs, max_model_len] int32, prompts and outputs by state row
    temperature: torch.Tensor  # [max_num_reqs] float32 by state row, 0 for greedy


class SamplerOption(ABC):
    """One option; its file holds its class, and `all_options.py` its place in the order.

    `words` encodes a request's parameters as a row of `table`. Requests that do not use the option have no row, and a
    batch without users of the option costs nothing.
    """

    def __init__(self, table: StagedRows) -> None:
        self.table = table
        self._users: set[int] = set()
        self._last: tuple[list[int], torch.Tensor] | None = None

    @abstractmethod
    def words(self, request: OptionRequest) -> Sequence[int] | None:
        """Return the request's row of the table, as int32 words; None if it does not use the option."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        """Change `logits` `[num_reqs, vocab_size]` float32, contiguous, in place.

        `selected` `[num_selected]` int32 are the rows of logits whose requests use the option: at least one,
        no padding. The other rows must stay as they are. Waits for nothing.
        """

    def stage(self, row: int, request: OptionRequest) -> None:
        """Stage a request at state row `row`, replacing any that was there."""
        self.remove(row)
        words = self.words(request)
        if words is not None:
            self._users.add(row)
            self.table.stage(row, words)

    def remove(self, row: int) -> None:
        """Remove the request at `row`. Idempotent."""
        self._users.discard(row)
        self.table.discard(row)

    def apply_staged_writes(self) -> None:
        """Copy staged rows to the device."""
        self.table.apply_staged_writes()

    def is_used(self, rows: Sequence[int]) -> bool:
        """Return True if a request at one of these state rows uses the option."""
        return bool(self._users) and not self._users.isdisjoint(rows)

    def select(self, batch: SamplingBatch) -> torch.Tensor:
        """Return the batch's rows that use the option, `[num_selected]` int32 on the device.

        Copies nothing if they equal those of the batch before.
        """
        at = [i for i, row in enumerate(batch.rows) if row in self._users]
        if self._last is None or self._last[0] != at:
            self._last = at, to_device(at, torch.int32, batch.idx_mapping.device)
        return self._last[1]
