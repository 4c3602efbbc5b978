"""Which program takes which part of a long request: each part once, in order, whatever the lengths."""

from __future__ import annotations

import random
from functools import partial
from itertools import accumulate

import pytest
import torch

from tests.interpreter import interpreted_case

BLOCK_N = 16


def parts(seq_len: int, window: int, max_parts: int, min_len: int) -> int:
    num_tiles = -(-(seq_len - 1) // BLOCK_N) - (max(seq_len - window, 0) // BLOCK_N if window else 0)
    return max(min(-(-num_tiles * BLOCK_N // min_len), max_parts, num_tiles), 1)


def check(lens: list[int], *, window: int = 0, max_parts: int = 5, min_len: int = 48) -> None:
    """Every number and every request, by the kernels' own functions and by plain arithmetic."""
    from tests.runner.attention.triton.kernels.long_requests_kernels import counted, looked_at, numbered

    seq_lens = torch.tensor(lens, dtype=torch.int32)
    more = [parts(each, window, max_parts, min_len) - 1 for each in lens]
    before = [0, *accumulate(more)]
    wanted = [[request, part, before[request]] for request, most in enumerate(more) for part in range(1, most + 1)]
    found = torch.full((len(wanted) + 2, 3), -1, dtype=torch.int32)
    how = (window, max_parts, min_len, BLOCK_N, window > 0)
    numbered[(len(wanted) + 2,)](seq_lens, found, len(lens), *how)
    assert found[:-2].tolist() == wanted
    assert found[-2:, 0].tolist() == [len(lens)] * 2
    ahead = torch.full((len(lens),), -1, dtype=torch.int32)
    counted[(len(lens),)](seq_lens, ahead, *how)
    assert ahead.tolist() == before[:-1]
    most = torch.full((1,), -1, dtype=torch.int32)
    looked_at[(1,)](seq_lens, most, len(lens))
    assert most.tolist() == [max(lens)]
    assert max(lens) > min_len - BLOCK_N or not any(more), "who looks at the longest alone would leave its parts out"


def lengths(count: int, seed: int, share: float = 0.1) -> list[int]:
    """Mostly short, some padding, some long."""
    chosen = random.Random(seed)
    return [
        chosen.randint(49, 400) if chosen.random() < share else chosen.choice((0, 1, 2, 17, 48)) for _ in range(count)
    ]


CASES = {
    "a few": partial(check, [40, 1, 91, 131, 4]),
    "one": partial(check, [500]),
    "none long": partial(check, [1, 2, 49]),
    "all long": partial(check, [400] * 12),
    "more than are looked at together": partial(check, lengths(300, 0, 0.03)),
    "as many as are looked at together": partial(check, lengths(256, 1)),
    "the last is long": partial(check, [*lengths(260, 2, 0.0), 300]),
    "a window": partial(check, lengths(40, 3, 0.5), window=100),
    "a small window": partial(check, lengths(40, 4, 0.5), window=5),
    "a part of no whole tiles": partial(check, [50, 35, 34, 51, 99], min_len=50),
    "parts of a tile": partial(check, lengths(40, 5, 0.5), min_len=1, max_parts=30),
}


@pytest.mark.parametrize("name", CASES)
def test_each_part_is_taken_once(name: str) -> None:
    interpreted_case(__name__, name)
