"""The map from the rows of a step to the slots of their adapters, at fixed addresses, derived on the device."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.lora import LoraRows
from piecegraph.runner.device_memory.staged_write import StagedWriteTensor

NO_ADAPTER = -1
"""The slot of a row without an adapter."""


class SlotMap:
    """The slot of each request's adapter, by the request's state row, and from it that of each row of a step."""

    def __init__(
        self, *, max_num_tokens: int, max_num_reqs: int, device: torch.device, max_num_logits: int | None = None
    ) -> None:
        """Allocate the tensors. `max_num_logits`: the rows of logits of a step; None: one for each request."""
        self._of_request = StagedWriteTensor((max_num_reqs,), torch.int32, device)
        self._tokens = torch.full((max_num_tokens,), NO_ADAPTER, dtype=torch.int32, device=device)
        self._logits = torch.full((max_num_logits or max_num_reqs,), NO_ADAPTER, dtype=torch.int32, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name; their addresses never change."""
        return {
            "adapters' slots": self._of_request.gpu,
            "slots of tokens": self._tokens,
            "slots of logits": self._logits,
        }

    def assign(self, row: int, slot: int) -> None:
        """Stage the slot of the request in a state row; `NO_ADAPTER`: it runs without one."""
        self._of_request.stage_write(row, 0, [slot])

    def apply_writes(self) -> None:
        """Write what was staged to the device."""
        self._of_request.apply_write()

    def clear_staged(self) -> None:
        """Discard what was staged."""
        self._of_request.clear_staged()

    def prepare(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, *, num_tokens: int, num_reqs: int
    ) -> None:
        """Compute the slots of `num_tokens` tokens, and of `num_reqs` rows of logits, one for each request.

        `idx_mapping` `[max_num_reqs]` and `query_start_loc` `[max_num_reqs + 1]`, int32, are those of `InputBuffers`.
        Both counts include padding, which has no adapter.
        """
        if self._tokens.device.type == "cuda":
            from piecegraph.runner.lora.kernels.slots import slots_on_gpu

            slots_on_gpu(
                idx_mapping, query_start_loc, self._of_request.gpu, self._tokens, self._logits, num_tokens, num_reqs
            )
            return
        slots_reference(
            idx_mapping, query_start_loc, self._of_request.gpu, self._tokens, self._logits, num_tokens, num_reqs
        )

    def prepare_logits(self, logits_indices: torch.Tensor) -> None:
        """Compute the slots of rows of logits from the token of each, `[num_logits]` int64, after `prepare`."""
        num_logits = logits_indices.shape[0]
        torch.index_select(self._tokens, 0, logits_indices, out=self._logits[:num_logits])

    def rows(self, num_tokens: int, logits_indices: torch.Tensor | int) -> LoraRows:
        """Return the slots of a step's rows.

        `logits_indices`: the number of rows of logits if these are prepared, one for each request or by
        `prepare_logits`. Otherwise the token that each row is computed from, `[num_logits]` int64.
        """
        tokens = self._tokens[:num_tokens]
        if isinstance(logits_indices, int):
            return LoraRows(tokens, self._logits[:logits_indices])
        return LoraRows(tokens, tokens[logits_indices])


def slots_reference(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    of_request: torch.Tensor,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    num_tokens: int,
    num_reqs: int,
) -> None:
    """Fill `tokens` and `logits` as `SlotMap.prepare` does, as the torch reference of the kernel."""
    rows = idx_mapping[:num_reqs]
    slots = torch.where(rows >= 0, of_request[rows.clamp(min=0).long()], NO_ADAPTER)
    logits[:num_reqs] = slots
    ends = query_start_loc[1 : num_reqs + 1].contiguous()
    request = torch.searchsorted(ends, torch.arange(num_tokens, dtype=torch.int32, device=ends.device), right=True)
    tokens[:num_tokens] = torch.cat([slots, slots.new_full((1,), NO_ADAPTER)])[request]
