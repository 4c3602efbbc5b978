"""Log probabilities of a token and of the likeliest tokens, without those of the whole vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LogprobsTensors(NamedTuple):
    """Log probabilities with one row a token, on the device."""

    token_ids: torch.Tensor  # [n, k + 1] int32: the token, then the k likeliest tokens, likeliest first
    logprobs: torch.Tensor  # [n, k + 1] float32
    ranks: torch.Tensor  # [n] int32: how many tokens are at least as likely as the token, itself included


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int, *, is_normalized: bool = True
) -> LogprobsTensors:
    """Return log probabilities under softmax(`logits`) of `token_ids` and of the `k` likeliest tokens.

    On a GPU the host does not wait. Prompts use this function too, with one row a prompt token.

    Args:
        logits: `[n, vocab_size]` of any float dtype, read as they are; sums are in float32.
        token_ids: `[n]` int64.
        k: how many of the likeliest tokens; above the vocabulary's size means all. They are picked by logits, whose
            order is that of probabilities.
        is_normalized: False returns the logits themselves instead.
    """
    token_ids = token_ids.unsqueeze(1)
    chosen = token_ids
    if k > 0:
        chosen = torch.cat([token_ids, logits.topk(min(k, logits.shape[1]), dim=-1).indices], dim=1)
    logsumexp = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    ranks = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    if logits.device.type == "cuda":
        from piecegraph.runner.sampling.kernels.logsumexp import logsumexp_and_ranks_on_gpu

        logsumexp_and_ranks_on_gpu(logits, token_ids, logsumexp, ranks)
    else:
        logsumexp_and_ranks_reference(logits, token_ids, logsumexp, ranks)
    logprobs = logits.gather(1, chosen).float()
    if is_normalized:
        logprobs -= logsumexp.unsqueeze(1)
    return LogprobsTensors(chosen.int(), logprobs, ranks)


def logsumexp_and_ranks_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, logsumexp: torch.Tensor, ranks: torch.Tensor
) -> None:
    """Write `logsumexp` `[n]` float32, log(sum(exp(logits))), and `ranks` `[n]` int32 of `token_ids` `[n, 1]`."""
    logsumexp.copy_(logits.float().logsumexp(-1))
    ranks.copy_((logits >= logits.gather(1, token_ids)).sum(-1))
