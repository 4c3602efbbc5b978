"""The order of 4-bit weights in words."""

from __future__ import annotations

import torch

from piecegraph.passes.kernels.quantised.words import from_words, to_words


def test_each_value_is_where_the_order_says() -> None:
    values = torch.randint(0, 16, (3, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = to_words(values)
    assert words.shape == (3, 32) and words.dtype is torch.int32
    for column in range(256):
        block, run, word, half = column // 128, column % 128 // 32, column % 32 // 2, column % 2
        found = words[:, block * 16 + word] >> (4 * run + 16 * half) & 15
        assert torch.equal(found, values[:, column].int()), column
    assert torch.equal(from_words(words), values)
    assert torch.equal(from_words(words.view(3, 2, 16)), values.view(3, 2, 128)), "any number of dims"
