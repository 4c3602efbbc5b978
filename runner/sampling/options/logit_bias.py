"""The option `logit_bias`: a number added to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.runner.sampling.options.protocol import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.options.staged_rows import StagedRows, float_word


class LogitBias(SamplerOption):
    """The option; a row of its table is pairs of a token and the bits of its bias."""

    def __init__(self, *, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(StagedRows(max_num_reqs, device, unit=2))

    def words(self, request: OptionRequest) -> Sequence[int] | None:
        if not request.params.logit_bias:
            return None
        return [word for token, bias in request.params.logit_bias.items() for word in (token, float_word(bias))]

    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        at = selected.long()
        words = self.table.words[batch.idx_mapping[at].long()]
        tokens, bias = words[:, ::2].long(), words[:, 1::2].contiguous().view(torch.float32)
        at = at.unsqueeze(1)
        logits[at, tokens] = logits[at, tokens] + bias  # not added in place: a pair may be repeated
