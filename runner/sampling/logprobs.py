"""Log probabilities of a token and of the likeliest ones, without those of the whole vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LogprobsTensors(NamedTuple):
    """A row a token, on the device."""

    token_ids: torch.Tensor  # [n, k + 1] int32: the token, then the k likeliest ones, likeliest first
    logprobs: torch.Tensor  # [n, k + 1] float32
    ranks: torch.Tensor  # [n] int32: how many tokens are at least as likely as the token, itself included


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsTensors:
    """Log probabilities under softmax(`logits`) of `token_ids` `[n]` int64, and of the `k` likeliest tokens.

    `logits` `[n, vocab_size]` of any float dtype are read as they are; sums are in float32. `k` above the
    vocabulary's size means all of it. The likeliest are picked from logits, whose order is that of
    probabilities. For prompts too: one row a prompt token. On a GPU it waits for nothing.
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
    logprobs = logits.gather(1, chosen).float() - logsumexp.unsqueeze(1)
    return LogprobsTensors(chosen.int(), logprobs, ranks)


def logsumexp_and_ranks_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, logsumexp: torch.Tensor, ranks: torch.Tensor
) -> None:
    """Write `logsumexp` `[n]` float32, log(sum(exp(logits))), and `ranks` `[n]` int32 of `token_ids` `[n, 1]`."""
    logsumexp.copy_(logits.float().logsumexp(-1))
    ranks.copy_((logits >= logits.gather(1, token_ids)).sum(-1))
