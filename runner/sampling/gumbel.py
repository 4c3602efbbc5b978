"""Gumbel noise as a function of (request seed, position, token): the same in any batch, on any run."""

from __future__ import annotations

import torch

from piecegraph.runner.sampling.philox import rand4x, randint4x

_TINY = 1e-20  # keeps log(0) away; below float32's smallest step of a uniform


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise `[num_reqs, vocab_size]` float32 for `seeds` and `positions`, both `[num_reqs]` int64.

    argmax(log p + noise) is a draw from p. A position's own 64-bit seed comes first
    (`randint4x(seed, position)`), then four numbers for each four tokens, `rand4x(position's seed, token // 4)`.
    """
    words = randint4x(seeds, positions)
    position_seeds = (words[0] << 32) | words[1]
    fours = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seeds.device)
    uniform = torch.stack(rand4x(position_seeds.unsqueeze(1), fours.unsqueeze(0)), dim=-1).flatten(1)[:, :vocab_size]
    return -torch.log(-torch.log(uniform + _TINY) + _TINY)
