"""Draws follow the distribution asked for, and depend on seed and position only."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.sampling.sampler import SamplingInputs, sample
from piecegraph.runner.sampling_params import SamplingParams

NUM_DRAWS = 20_000


def inputs(params: SamplingParams, seeds: list[int], positions: list[int]) -> SamplingInputs:
    return SamplingInputs(params=(params,) * len(seeds), seeds=tuple(seeds), positions=tuple(positions))


def allowed_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution written out: temperature, then the k likeliest, then the nucleus."""
    probabilities = (logits.double() / params.temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    kept = order[: params.top_k] if params.top_k > 0 else order
    total = sum(float(probabilities[token]) for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        nucleus.append(token)
        reached += float(probabilities[token]) / total
        if reached >= params.top_p:
            break
    mask = torch.zeros_like(probabilities)
    mask[nucleus] = 1
    return probabilities * mask / (probabilities * mask).sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"top_k": 5, "top_p": 0.8, "temperature": 1.3},
        {"top_k": 100, "top_p": 1.0},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    """Chi-square against exact probabilities, at the 99.9 % point; nothing outside is ever drawn."""
    params = SamplingParams(**options)  # type: ignore[arg-type]
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0])
    expected = allowed_probabilities(logits, params) * NUM_DRAWS
    tokens = sample(logits.expand(NUM_DRAWS, -1), inputs(params, [7] * NUM_DRAWS, list(range(NUM_DRAWS))))
    counts = torch.bincount(tokens, minlength=8).double()
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < [0, 1e-9, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3][int(possible.sum())]


def test_a_seed_draws_the_same_in_any_batch() -> None:
    """Noise is a function of seed and position: neither row nor neighbours matter."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(top_k=20, top_p=0.9)
    seeds, positions = [1, 2, 1, 99, 2**62, 0], [5, 5, 6, 0, 1000, 5]
    together = sample(logits, inputs(params, seeds, positions))
    backwards = sample(logits.flip(0), inputs(params, seeds[::-1], positions[::-1])).flip(0)
    alone = torch.cat([sample(logits[i : i + 1], inputs(params, [seeds[i]], [positions[i]])) for i in range(6)])
    assert together.tolist() == backwards.tolist() == alone.tolist()


def test_seeds_and_positions_draw_differently() -> None:
    logits = torch.zeros(64, 1000)
    by_position = sample(logits, inputs(SamplingParams(), [1] * 64, list(range(64))))
    by_seed = sample(logits, inputs(SamplingParams(), list(range(64)), [1] * 64))
    assert len(set(by_position.tolist())) > 55
    assert len(set(by_seed.tolist())) > 55


def test_greedy_and_random_rows_share_a_batch() -> None:
    """A greedy row takes the likeliest token, whatever its neighbours do."""
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    greedy, random = SamplingParams(temperature=0.0), SamplingParams(temperature=5.0, seed=3)
    mixed = SamplingInputs(params=(greedy, random, greedy, random), seeds=(0, 3, 0, 3), positions=(1, 1, 1, 2))
    tokens = sample(logits, mixed)
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    assert tokens[[1, 3]].tolist() == sample(logits[[1, 3]], inputs(random, [3, 3], [1, 2])).tolist()


def test_half_precision_logits_are_drawn_from_in_float32() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    mine = inputs(SamplingParams(), [1, 2, 3], [0, 0, 0])
    assert sample(logits, mine).tolist() == sample(logits.float(), mine).tolist()
