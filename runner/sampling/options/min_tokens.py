"""The option `min_tokens`: tokens that end the text are masked until it is long enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.runner.sampling.options.protocol import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.options.staged_rows import StagedRows

LAST_POSITION = 2**31 - 1
"""The largest position that a word holds; no text is as long."""


class MinTokens(SamplerOption):
    """The option; a row of its table is the first position where the text may end, then the tokens that end it."""

    def __init__(self, *, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(StagedRows(max_num_reqs, device))
        self._vocab_size = vocab_size

    def words(self, request: OptionRequest) -> Sequence[int] | None:
        # A token the model does not have cannot be drawn anyhow.
        tokens = sorted(token for token in request.stop_token_ids if token < self._vocab_size)
        if request.params.min_tokens == 0 or not tokens:
            return None
        return [min(request.prompt_len + request.params.min_tokens, LAST_POSITION), *tokens]

    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        at = selected.long()
        words = self.table.words[batch.idx_mapping[at].long()]
        first_end, tokens = words[:, :1], words[:, 1:].long()  # a token may be repeated: it gets the same value
        at = at.unsqueeze(1)
        is_too_early = batch.positions[at] < first_end
        logits[at, tokens] = logits[at, tokens].masked_fill(is_too_early, float("-inf"))
