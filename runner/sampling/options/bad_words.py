"""The option `bad_words`: a token that would complete a bad word is masked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from piecegraph.runner.sampling.options.protocol import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.options.staged_rows import StagedRows


class BadWords(SamplerOption):
    """The option; a word counts only if all of it is generated, as in vLLM, and not if the prompt began it.

    A row of its table is the prompt's length, the number of words, where each word begins in the row and the last one
    ends, then all their tokens.
    """

    def __init__(self, *, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(StagedRows(max_num_reqs, device))
        self._vocab_size = vocab_size
        self._num_words: dict[int, int] = {}  # by state row

    def words(self, request: OptionRequest) -> Sequence[int] | None:
        # A word with a token that the model does not have cannot be completed.
        words = [word for word in request.bad_words if max(word) < self._vocab_size]
        if not words:
            return None
        starts = accumulate(map(len, words), initial=3 + len(words))
        return [request.prompt_len, len(words), *starts, *(token for word in words for token in word)]

    def stage(self, row: int, request: OptionRequest) -> None:
        super().stage(row, request)
        self._num_words[row] = len(request.bad_words)

    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        arguments = (logits, selected, batch.idx_mapping, batch.positions, batch.token_ids, self.table.words)
        if logits.device.type == "cuda":
            from piecegraph.runner.sampling.kernels.forbid_bad_words import forbid_bad_words_on_gpu

            max_num_words = max(self._num_words.get(row, 0) for row in batch.rows)
            forbid_bad_words_on_gpu(*arguments, max_num_words=max_num_words)
            return
        forbid_bad_words_reference(*arguments)


def forbid_bad_words_reference(
    logits: torch.Tensor,
    selected: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Set `logits` to -inf where a token completes a bad word, in the rows `selected`. Loops on the host."""
    for at in selected.tolist():
        row = int(idx_mapping[at])
        prompt_len, num_words, *rest = table[row].tolist()
        output = token_ids[row, prompt_len : int(positions[at])].tolist()
        for i in range(num_words):
            *begin, last = rest[rest[i] - 2 : rest[i + 1] - 2]
            if len(begin) <= len(output) and output[len(output) - len(begin) :] == begin:
                logits[at, last] = float("-inf")
