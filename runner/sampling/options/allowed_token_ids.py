"""The option `allowed_token_ids`: all other tokens are masked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from piecegraph.runner.sampling.options.protocol import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.options.staged_rows import StagedRows


class AllowedTokenIds(SamplerOption):
    """The option; a row of its table is a bitmask: token t is bit t % 32 of word t // 32."""

    def __init__(self, *, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(StagedRows(max_num_reqs, device))
        self._num_words = -(-vocab_size // 32)

    def words(self, request: OptionRequest) -> Sequence[int] | None:
        allowed = request.params.allowed_token_ids
        if allowed is None:
            return None
        bits = np.zeros(self._num_words * 32, dtype=np.uint8)
        bits[list(allowed)] = 1
        words: list[int] = np.packbits(bits, bitorder="little").view("<i4").tolist()
        return words

    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        if logits.device.type == "cuda":
            from piecegraph.runner.sampling.kernels.apply_bitmask import apply_bitmask_on_gpu

            apply_bitmask_on_gpu(logits, selected, batch.idx_mapping, self.table.words)
            return
        apply_bitmask_reference(logits, selected, batch.idx_mapping, self.table.words)


def apply_bitmask_reference(
    logits: torch.Tensor, selected: torch.Tensor, idx_mapping: torch.Tensor, bitmask: torch.Tensor
) -> None:
    """Set `logits` `[num_reqs, vocab_size]` to -inf for tokens whose bit is 0, in the rows `selected`.

    `selected`: `[num_selected]` int32. `bitmask`: `[max_num_reqs, at least vocab_size / 32]` int32.
    """
    at = selected.long()
    tokens = torch.arange(logits.shape[1], device=logits.device)
    words = bitmask[idx_mapping[at].long()][:, tokens // 32]
    is_out = (words >> (tokens % 32).int()) & 1 == 0
    logits[at] = logits[at].masked_fill(is_out, float("-inf"))
