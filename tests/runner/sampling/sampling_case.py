"""Requests for the sampler, and a plain reference of it: one row, one option after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.sampling.gumbel_sample import gumbel_noise

MAX_MODEL_LEN = 32


@dataclass(frozen=True, kw_only=True)
class Case:
    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2)
    output: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def make_sampler(
    cases: Sequence[Case],
    rows: Sequence[int],
    *,
    vocab_size: int,
    device: str = "cpu",
    max_num_reqs: int = 8,
    sampler: Sampler | None = None,
) -> tuple[Sampler, dict[str, Any]]:
    """A sampler that holds `cases` at `rows` (-1: padding, whose case is ignored), and the arguments of `sample`
    besides the logits. Tokens past a request's end are out of any vocabulary."""
    if sampler is None:
        sampler = Sampler(
            max_num_reqs=max_num_reqs, max_model_len=MAX_MODEL_LEN, vocab_size=vocab_size, device=torch.device(device)
        )
    token_ids = torch.full((max_num_reqs, MAX_MODEL_LEN), 0x7F7F7F7F, dtype=torch.int32)
    for case, row in zip(cases, rows, strict=True):
        if row >= 0:
            token_ids[row, : case.position] = torch.tensor(case.prompt + case.output, dtype=torch.int32)
            sampler.add_request(
                row,
                case.params,
                seed=case.seed,
                prompt_len=len(case.prompt),
                stop_token_ids=case.stop_token_ids,
                bad_words=case.bad_words,
            )
    sampler.apply_staged_writes()
    return sampler, {
        "rows": list(rows),
        "idx_mapping": torch.tensor(rows, dtype=torch.int32, device=device),
        "positions": torch.tensor([case.position for case in cases], dtype=torch.int32, device=device),
        "token_ids": token_ids.to(device),
    }


def plain_logits(logits: torch.Tensor, case: Case) -> np.ndarray:
    """Return the logits that are drawn from, `[vocab_size]` float64: one request's after every option, one by one."""
    params = case.params
    x = logits.double().numpy().copy()
    if params.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -np.inf
    for word in case.bad_words:
        begin, last = word[:-1], word[-1]
        if not begin or case.output[-len(begin) :] == begin:
            x[last] = -np.inf
    if len(case.output) < params.min_tokens:
        x[[token for token in case.stop_token_ids if token < len(x)]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    counts = Counter(case.output)
    for token in {*case.prompt, *case.output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
    if params.is_greedy or not np.isfinite(x).any():
        return x
    x /= params.temperature
    x[np.exp(x - x.max()) < params.min_p] = -np.inf
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        probabilities = np.exp(x - x.max())
        probabilities /= probabilities.sum()
        reached = 0.0
        for token in np.argsort(-x, kind="stable"):
            if reached >= params.top_p:
                x[token] = -np.inf
            reached += probabilities[token]
    return x


def plain_token(logits: torch.Tensor, case: Case) -> tuple[int, float]:
    """Return the token of the same noise, and its lead over the second best."""
    scores = plain_logits(logits, case)
    if not np.isfinite(scores).any():
        return 0, np.inf
    if not case.params.is_greedy:
        noise = gumbel_noise(torch.tensor([case.seed]), torch.tensor([case.position]), len(scores))
        scores += noise[0].double().numpy()
    second, first = np.argsort(scores)[-2:]
    return int(first), float(scores[first] - scores[second])
