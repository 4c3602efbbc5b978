"""Gumbel noise as a function of (request seed, position, token): the same in any batch, on any run."""

from __future__ import annotations

import torch

from piecegraph.runner.sampling.philox import rand, randint4x

_TINY = 1e-20  # keeps log(0) away; below float32's smallest step of a uniform


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise `[num_reqs, vocab_size]` float32 for `seeds` and `positions`, both `[num_reqs]` int64.

    argmax(log p + noise) is a draw from p. A position's own 64-bit seed comes first
    (`randint4x(seed, position)`), then one number a token (`rand(position's seed, token)`).
    """
    words = randint4x(seeds, positions)
    position_seeds = (words[0] << 32) | words[1]
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    uniform = rand(position_seeds.unsqueeze(1), tokens.unsqueeze(0))
    return -torch.log(-torch.log(uniform + _TINY) + _TINY)
