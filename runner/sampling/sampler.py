"""From logits to tokens: greedy and random rows in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from piecegraph.runner.sampling.gumbel import gumbel_noise
from piecegraph.runner.sampling.top_k_top_p import mask_top_k_top_p
from piecegraph.runner.sampling_params import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """One row a request that samples in this step."""

    params: tuple[SamplingParams, ...]
    seeds: tuple[int, ...]
    positions: tuple[int, ...]  # where the drawn token will stand


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """One token a row, `[num_reqs]` int64, from `logits` `[num_reqs, vocab_size]` of any float dtype.

    Rows with temperature 0 take the likeliest token, the others draw after temperature, top-k and top-p
    with noise that depends on seed and position only.
    """
    is_random = [row for row, params in enumerate(inputs.params) if not params.is_greedy]
    if not is_random:
        return logits.argmax(-1)
    if len(is_random) == len(inputs.params):
        return _draw(logits, inputs)
    tokens = logits.argmax(-1)
    rows = torch.tensor(is_random, device=logits.device)
    tokens[rows] = _draw(
        logits[rows],
        SamplingInputs(
            params=_pick(inputs.params, is_random),
            seeds=_pick(inputs.seeds, is_random),
            positions=_pick(inputs.positions, is_random),
        ),
    )
    return tokens


def _draw(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    device, vocab_size = logits.device, logits.shape[1]
    temperature = torch.tensor([params.temperature for params in inputs.params], dtype=torch.float32, device=device)
    scaled = logits.float() / temperature.unsqueeze(1)
    if any(params.top_k > 0 or params.top_p < 1 for params in inputs.params):
        top_k = [min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size for params in inputs.params]
        top_p = [params.top_p for params in inputs.params]
        scaled = mask_top_k_top_p(
            scaled,
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor(top_p, dtype=torch.float32, device=device),
        )
    seeds = torch.tensor(inputs.seeds, dtype=torch.int64, device=device)
    positions = torch.tensor(inputs.positions, dtype=torch.int64, device=device)
    return (scaled + gumbel_noise(seeds, positions, vocab_size)).argmax(-1)


def _pick(values: Sequence[T], rows: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[row] for row in rows)
