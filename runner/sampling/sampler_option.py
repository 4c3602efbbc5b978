"""What an option of the sampler is: who uses it, its table on the device, and what it does to logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from piecegraph.runner.host_copy import to_device
from piecegraph.runner.sampling.staged_rows import StagedRows
from piecegraph.runner.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRequest:
    """What an option may want to know of a request."""

    params: SamplingParams
    prompt_len: int
    stop_token_ids: Collection[int]  # all that end its text, EOS tokens included
    bad_words: Sequence[Sequence[int]]  # token ids of each


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The rows of logits of a step. Besides `rows` all lies on the device, without gaps."""

    rows: Sequence[int]  # [num_reqs], on the host: state row of each row of logits, -1 for padding
    idx_mapping: torch.Tensor  # [num_reqs] int32, the same
    positions: torch.Tensor  # [num_reqs] int32, where the drawn tokens will stand
    token_ids: torch.Tensor  # [max_num_reqs, max_model_len] int32, prompts and outputs by state row
    temperature: torch.Tensor  # [max_num_reqs] float32 by state row, 0 for greedy


class SamplerOption(ABC):
    """One option: its file holds its class, and `options.py` its place in the order.

    A request is described by the words that `words` makes of it, in the row of `table` that is the
    request's. Requests that do not use the option have none, and a batch without users costs nothing.
    """

    def __init__(self, table: StagedRows) -> None:
        self.table = table
        self._users: set[int] = set()
        self._last: tuple[list[int], torch.Tensor] | None = None

    @abstractmethod
    def words(self, request: OptionRequest) -> Sequence[int] | None:
        """The request's row of the table, as int32 words; None if it does not use the option."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        """Change `logits` `[num_reqs, vocab_size]` float32, contiguous, in place.

        `selected` `[num_selected]` int32 names the rows of logits whose requests use the option: one at
        least, no padding. The others must stay as they are. Waits for nothing.
        """

    def stage(self, row: int, request: OptionRequest) -> None:
        """Take over a request at `row` of the states."""
        self.remove(row)
        words = self.words(request)
        if words is not None:
            self._users.add(row)
            self.table.stage(row, words)

    def remove(self, row: int) -> None:
        """The row's request is gone."""
        self._users.discard(row)
        self.table.discard(row)

    def apply_staged_writes(self) -> None:
        """Bring what was staged to the device."""
        self.table.apply_staged_writes()

    def is_used(self, rows: Sequence[int]) -> bool:
        """Whether the request of any of these state rows uses the option."""
        return bool(self._users) and not self._users.isdisjoint(rows)

    def select(self, batch: SamplingBatch) -> torch.Tensor:
        """The batch's rows that use the option, `[num_selected]` int32 on the device.

        A batch with the users of the one before copies nothing.
        """
        at = [i for i, row in enumerate(batch.rows) if row in self._users]
        if self._last is None or self._last[0] != at:
            self._last = at, to_device(at, torch.int32, batch.idx_mapping.device)
        return self._last[1]
