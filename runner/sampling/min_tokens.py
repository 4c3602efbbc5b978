"""`min_tokens`: what ends the text is out until it is long enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.runner.sampling.sampler_option import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.staged_rows import StagedRows


class MinTokens(SamplerOption):
    """A row of the table: the first position where the text may end, then the tokens that end it."""

    def __init__(self, *, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(StagedRows(max_num_reqs, device))
        self._vocab_size = vocab_size

    def words(self, request: OptionRequest) -> Sequence[int] | None:
        # A token the model does not have cannot be drawn anyhow.
        tokens = sorted(token for token in request.stop_token_ids if token < self._vocab_size)
        if request.params.min_tokens == 0 or not tokens:
            return None
        return [request.prompt_len + request.params.min_tokens, *tokens]

    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        at = selected.long()
        words = self.table.words[batch.idx_mapping[at].long()]
        first_end, tokens = words[:, :1], words[:, 1:].long()  # a token may be repeated: it gets the same value
        at = at.unsqueeze(1)
        is_too_early = batch.positions[at] < first_end
        logits[at, tokens] = logits[at, tokens].masked_fill(is_too_early, float("-inf"))
