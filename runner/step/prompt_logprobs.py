"""Log probabilities of prompt tokens: the requests that want them, and the rows of a step's batch they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.runner.device_memory.host_memory.host_copy import to_device
from piecegraph.runner.output.async_output import PromptRows
from piecegraph.runner.sampling.logprobs import LogprobsTensors, gather_logprobs
from piecegraph.runner.scheduling.scheduler_output import AddedRequest, ScheduledRequest
from piecegraph.runner.step.state.request_states import RequestStates


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsBatch:
    """The prompt rows of a step whose logits are needed, request after request."""

    rows: tuple[PromptRows, ...]
    indices: tuple[int, ...]  # rows of the batch; the row at position p predicts the token at p + 1
    num_logprobs: int  # the largest number that a request asked for

    def logits_indices(self, device: torch.device) -> torch.Tensor:
        """Return `indices` as a tensor `[num_rows]` int64 on `device`."""
        return to_device(self.indices, torch.int64, device)

    def gather(self, logits: torch.Tensor, states: RequestStates) -> LogprobsTensors:
        """Return the log probabilities of the prompt tokens, from the logits `[num_rows, vocab_size]` of `indices`."""
        device = logits.device
        state_rows = [states.row(row.request_id) for row in self.rows for _ in range(row.num_rows)]
        positions = [position for row in self.rows for position in range(row.start, row.start + row.num_rows)]
        tokens = states.token_ids[to_device(state_rows, torch.int64, device), to_device(positions, torch.int64, device)]
        return gather_logprobs(logits, tokens.long(), self.num_logprobs)


class PromptLogprobsStates:
    """The running requests that want log probabilities of their prompts; usually empty."""

    def __init__(self) -> None:
        self._wanted: dict[str, tuple[int, int]] = {}  # by request: how many, and the prompt's length

    def add(self, added: AddedRequest) -> None:
        """Keep an added request, if it wants log probabilities of its prompt."""
        wanted = added.sampling_params.prompt_logprobs
        if wanted is not None:
            self._wanted[added.request_id] = (wanted, added.num_prompt_tokens)

    def remove(self, request_id: str) -> None:
        """Drop a request."""
        self._wanted.pop(request_id, None)

    def clear(self) -> None:
        """Drop all requests."""
        self._wanted.clear()

    def batch(self, scheduled: Sequence[ScheduledRequest]) -> PromptLogprobsBatch | None:
        """Return the prompt rows of a step, or None if it has none. No row predicts the first token of a prompt."""
        if not self._wanted:
            return None
        rows: list[PromptRows] = []
        indices: list[int] = []
        num_logprobs, first = 0, 0
        for item in scheduled:
            wanted, prompt_len = self._wanted.get(item.request_id, (0, 0))
            start = item.num_computed_tokens
            num_rows = min(start + item.num_tokens, prompt_len - 1) - start
            if num_rows > 0:
                rows.append(PromptRows(item.request_id, start + 1, num_rows))
                indices += range(first, first + num_rows)
                num_logprobs = max(num_logprobs, 2**31 if wanted < 0 else wanted)
            first += item.num_tokens
        return (
            PromptLogprobsBatch(rows=tuple(rows), indices=tuple(indices), num_logprobs=num_logprobs) if rows else None
        )
