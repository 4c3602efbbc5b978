"""The options `min_p`, `top_k` and `top_p`: unlikely tokens are masked, in this order, in shared passes over logits.

Greedy rows skip them, since the likeliest token always stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from piecegraph.runner.sampling.kernels.cpu_truncate import truncate_on_cpu
from piecegraph.runner.sampling.options.protocol import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.options.staged_rows import StagedRows, float_word


class Truncation(SamplerOption):
    """The option; a row of its table is top_k (0 for off), then the bits of top_p and of the logarithm of min_p."""

    def __init__(self, *, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(StagedRows(max_num_reqs, device, width=3))
        self._vocab_size = vocab_size

    def words(self, request: OptionRequest) -> Sequence[int] | None:
        params = request.params
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        if params.is_greedy or (top_k == 0 and params.top_p == 1 and params.min_p == 0):
            return None
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        return [top_k, float_word(params.top_p), float_word(log_min_p)]

    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        arguments = (logits, selected, batch.idx_mapping, batch.temperature, self.table.words)
        if logits.device.type == "cuda":
            from piecegraph.runner.sampling.kernels.truncate import truncate_on_gpu

            truncate_on_gpu(*arguments)
        elif not truncate_on_cpu(*arguments):
            truncate_reference(*arguments)


def truncate_reference(
    logits: torch.Tensor,
    selected: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Set `logits` `[num_reqs, vocab_size]` float32 to -inf in the rows `selected` for tokens that are masked.

    The choice is made on logits divided by `temperature` `[max_num_reqs]` (above 0 in these rows); the
    logits that stay are not divided. Of tokens that tie at top_k all stay, at top_p the first ones. NaNs are masked.
    """
    at = selected.long()
    row = idx_mapping[at].long()
    top_k, words = table[row, 0].long(), table[row, 1:].contiguous().view(torch.float32)
    top_p, log_min_p = words.unbind(1)
    chosen = logits[at]
    scaled = (chosen / temperature[row].unsqueeze(1)).nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf)
    scaled = mask_min_p(scaled, log_min_p)
    scaled = mask_top_k_top_p(scaled, torch.where(top_k > 0, top_k, logits.shape[1]), top_p)
    logits[at] = chosen.masked_fill(scaled == -math.inf, -math.inf)


def mask_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Return `logits` with -inf for tokens less than `min_p` times as likely as the likeliest.

    Args:
        logits: `[num_reqs, vocab_size]` float32, after temperature.
        log_min_p: `[num_reqs]` float32, the logarithm of `min_p`; -inf turns it off.
    """
    least = logits.amax(-1) + log_min_p
    return logits.masked_fill(logits < least.unsqueeze(1), -math.inf)


def mask_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return `logits` with -inf for tokens outside the `top_k` likeliest, then outside the `top_p` nucleus.

    Args:
        logits: `[num_reqs, vocab_size]` float32, after temperature.
        top_k: `[num_reqs]` int64; `vocab_size` turns it off. Tokens that tie with the last kept stay.
        top_p: `[num_reqs]` float32; 1 turns it off. Probabilities are those after top-k; the token that
            reaches `top_p` is kept, so one always is. Of equal tokens the first ones are kept.
    """
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    last_kept = sorted_logits.gather(1, (top_k - 1).unsqueeze(1))
    sorted_logits = sorted_logits.masked_fill(sorted_logits < last_kept, -math.inf)
    probabilities = sorted_logits.softmax(-1)
    reached_before = probabilities.cumsum(-1) - probabilities
    is_outside = (reached_before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    is_outside[:, 0] = False
    sorted_logits = sorted_logits.masked_fill(is_outside, -math.inf)
    return torch.empty_like(logits).scatter_(1, order, sorted_logits)
