"""The kernels penalise as their reference does; the reference is tested with the sampler."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.sampling.options.penalties import apply_penalties_reference
from piecegraph.runner.sampling.options.staged_rows import float_word
from tests.interpreter import interpreted

VOCAB, LEN = 500, 1500


def inputs(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """A prompt and an output longer than a program counts, one without output, one of a single token."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB, generator=random)
    token_ids = torch.randint(0, 60, (5, LEN), generator=random, dtype=torch.int32)
    positions = torch.tensor([LEN, 700, 9, 1], dtype=torch.int32)
    for row, position in ((4, LEN), (0, 700), (3, 1)):
        token_ids[row, position:] = 0x7F7F7F7F
    table = torch.tensor(
        [
            [700, float_word(1.3), float_word(0.5), float_word(-0.25)],
            [0, 0, 0, 0],
            [9, 0, 0, 0],
            [1, float_word(0.5), float_word(0.0), float_word(2.0)],
            [1100, float_word(1.0), float_word(-0.125), float_word(1.4)],
        ],
        dtype=torch.int32,
    )
    selected = torch.tensor([0, 1, 3], dtype=torch.int32)
    idx_mapping = torch.tensor([4, 0, 2, 3], dtype=torch.int32)
    found = (logits, selected, idx_mapping, positions, token_ids, table)
    return tuple(tensor.to(device) for tensor in found)


def check_kernel(device: str = "cpu") -> None:
    from piecegraph.runner.sampling.kernels.penalties import apply_penalties_on_gpu

    logits, *rest = inputs(device)
    expected, found = logits.clone(), logits.clone()
    apply_penalties_reference(expected, *rest)
    apply_penalties_on_gpu(found, *rest)
    assert (expected != logits).sum(-1).tolist() == [59, 60, 0, 1], "row 4 has a token in its prompt only"
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)  # a multiplication and an addition may be one


def test_the_kernels_equal_the_reference() -> None:
    interpreted(check_kernel)


@pytest.mark.gpu
def test_the_kernels_equal_the_reference_on_the_gpu() -> None:
    check_kernel("cuda")
