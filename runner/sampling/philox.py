"""Philox4x32-10: random numbers as a pure function of a key and a counter.

The numbers equal those of Triton's `tl.rand` and `tl.randint4x`, so that noise does not depend on the device.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), and Random123.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_INT32_TO_UNIT = 4.6566127342e-10  # Triton's: the largest for which every int32 stays below 1 in float32

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return four random words for each counter. All are int64 tensors that hold 32-bit words and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B  # modulo 2**64: the sign bit is the 64th
        c0, c2 = _high(product_b) ^ c1 ^ k0, _high(product_a) ^ c3 ^ k1
        c1, c3 = product_b & _WORD, product_a & _WORD
        k0, k1 = (k0 + _KEY_A) & _WORD, (k1 + _KEY_B) & _WORD
    return c0, c1, c2, c3


def randint4x(seed: torch.Tensor, offset: torch.Tensor) -> Words:
    """Return `tl.randint4x(seed, offset)` for 64-bit seeds and 32-bit offsets (int64 tensors that broadcast)."""
    zero = torch.zeros_like(offset)
    return philox4x32((offset & _WORD, zero, zero, zero), (seed & _WORD, _high(seed)))


def rand4x(seed: torch.Tensor, offset: torch.Tensor) -> Words:
    """Return `tl.rand4x(seed, offset)`: four tensors of float32 in [0, 1)."""
    first, second, third, fourth = map(_uniform, randint4x(seed, offset))
    return first, second, third, fourth


def _uniform(word: torch.Tensor) -> torch.Tensor:
    signed = torch.where(word >= 2**31, word - 2**32, word)
    return torch.where(signed < 0, -signed - 1, signed).to(torch.float32) * _INT32_TO_UNIT


def _high(x: torch.Tensor) -> torch.Tensor:
    return (x >> 32) & _WORD
