"""The options `repetition_penalty`, `frequency_penalty` and `presence_penalty`: earlier tokens become less likely.

No state is kept from step to step: tokens are counted anew from the requests' states, so a request
that was preempted, or moved to another row, needs no special treatment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.runner.sampling.options.protocol import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.options.staged_rows import StagedRows, float_word


class Penalties(SamplerOption):
    """The options; a row of their table is the prompt's length, then the bits of the three penalties in that order."""

    def __init__(self, *, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(StagedRows(max_num_reqs, device, width=4))

    def words(self, request: OptionRequest) -> Sequence[int] | None:
        params = request.params
        if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1, 0, 0):
            return None
        return [
            request.prompt_len,
            float_word(params.repetition_penalty),
            float_word(params.frequency_penalty),
            float_word(params.presence_penalty),
        ]

    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        arguments = (logits, selected, batch.idx_mapping, batch.positions, batch.token_ids, self.table.words)
        if logits.device.type == "cuda":
            from piecegraph.runner.sampling.kernels.penalties import apply_penalties_on_gpu

            apply_penalties_on_gpu(*arguments)
            return
        apply_penalties_reference(*arguments)


def apply_penalties_reference(
    logits: torch.Tensor,
    selected: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Penalise `logits` in the rows `selected`, by the tokens before `positions` and the penalties in `table`."""
    at = selected.long()
    row = idx_mapping[at].long()
    words = table[row]
    repetition, frequency, presence = words[:, 1:].contiguous().view(torch.float32).unsqueeze(2).unbind(1)
    longest = int(torch.maximum(positions[at], words[:, 0]).max()) if len(at) else 0
    index = torch.arange(min(longest, token_ids.shape[1]), device=logits.device)
    is_output = (index >= words[:, :1]) & (index < positions[at].unsqueeze(1))
    is_prompt = index < words[:, :1]
    tokens = token_ids[row, : len(index)].long()
    tokens = tokens.masked_fill(~(is_output | is_prompt), 0)  # the rest of a row is anything
    zeros = torch.zeros(len(at), logits.shape[1], dtype=torch.int32, device=logits.device)
    in_output = zeros.scatter_add(1, tokens, is_output.int()).gather(1, tokens)  # of each token of the text
    in_prompt = zeros.scatter_add(1, tokens, is_prompt.int()).gather(1, tokens)
    penalised = logits[at.unsqueeze(1), tokens]
    scale = torch.where((in_output > 0) | (in_prompt > 0), repetition, 1.0)
    penalised = torch.where(penalised > 0, penalised / scale, penalised * scale)
    logits[at.unsqueeze(1), tokens] = penalised - frequency * in_output - presence * (in_output > 0)
