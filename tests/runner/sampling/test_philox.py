"""Philox gives the numbers of its paper, and Triton's."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.sampling.philox import philox4x32, rand4x, randint4x
from tests.interpreter import interpreted

KNOWN = [
    # counter, key, result: the known-answer vectors for philox4x32-10 that come with Random123
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], result: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == result


def check_triton() -> None:
    from tests.runner.sampling.philox_kernel import draw

    offsets = torch.arange(16)
    for seed in (0, 1, 2**31, 2**32 + 5, 2**63 - 1):
        uniform, words = torch.empty(32), torch.empty(32, dtype=torch.int32)
        draw[(1,)](torch.tensor([seed]), uniform, words, n=16)
        key = torch.full((16,), seed)
        of_four = rand4x(key, offsets)
        assert torch.equal(torch.cat([of_four[0], of_four[3]]), uniform)
        first, second, _, _ = randint4x(key, offsets)
        assert torch.cat([first, second]).tolist() == [word & 0xFFFFFFFF for word in words.tolist()]


def test_same_numbers_as_triton() -> None:
    """Bit for bit, seeds above 32 bits included, so that a kernel draws what the CPU drew."""
    pytest.importorskip("triton")
    interpreted(check_triton)


def test_rand_is_uniform() -> None:
    """Below 1, from 0, evenly: chi-square of 64 bins at the 99.9 % point (103.4 for 63 degrees)."""
    draws = torch.stack(rand4x(torch.tensor([[3], [4]]), torch.arange(25_000).unsqueeze(0)))
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    counts = torch.histc(draws.double(), bins=64, min=0, max=1)
    expected = draws.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 103.4
