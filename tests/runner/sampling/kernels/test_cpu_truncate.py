"""The C++ kernel of min_p, top_k and top_p keeps what its reference keeps, which sorts."""

from __future__ import annotations

import math

import pytest
import torch

from piecegraph.runner.sampling.kernels.cpu_truncate import KERNEL, truncate_on_cpu
from piecegraph.runner.sampling.options.truncation import truncate_reference
from tests.cpp_kernels import needs_cpp_compiler, use_kernel
from tests.runner.sampling.options.test_truncation import OPTIONS, awkward_logits, table_of

pytestmark = needs_cpp_compiler


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(KERNEL, monkeypatch)


def both(logits: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits that the kernel masked, and those that the reference masked."""
    found, expected = logits.clone(), logits.clone()
    assert truncate_on_cpu(found, *inputs)
    truncate_reference(expected, *inputs)
    return found, expected


def test_awkward_rows_keep_what_the_reference_keeps() -> None:
    logits = awkward_logits()
    rows = torch.arange(len(logits), dtype=torch.int32)
    temperature = torch.tensor([0.7, 1.0, 1.9]).repeat(len(logits))[: len(logits)]
    table = table_of(OPTIONS * 4, "cpu").flip(0).contiguous()
    found, expected = both(logits, rows[rows % 8 != 3], rows.flip(0), temperature, table)
    assert torch.equal(found[rows % 8 != 3], expected[rows % 8 != 3])
    untouched = rows % 8 == 3
    assert torch.equal(found[untouched].isnan(), logits[untouched].isnan())
    assert torch.equal(found[untouched].nan_to_num(), logits[untouched].nan_to_num())


@pytest.mark.parametrize("seed", range(8))
def test_random_rows_keep_what_the_reference_keeps(seed: int) -> None:
    """But for the token at which top_p is just reached, where sums of float32 may decide; never one of equal rank."""
    random = torch.Generator().manual_seed(seed)
    vocab_size = (1, 2, 5, 64, 300, 3001, 10_000, 49_152)[seed]
    logits = torch.randn(len(OPTIONS), vocab_size, generator=random) * torch.tensor([0.1, 1.0, 8.0])[seed % 3]
    logits[torch.rand(logits.shape, generator=random) < 0.05] = -math.inf
    logits[torch.rand(logits.shape, generator=random) < 0.01] = math.nan
    rows = torch.arange(len(OPTIONS), dtype=torch.int32)
    temperature = torch.rand(len(OPTIONS), generator=random) + 0.3
    options = [(k if k < vocab_size else 0, p, m) for k, p, m in OPTIONS]
    found, expected = both(logits, rows, rows, temperature, table_of(options, "cpu"))
    for row in range(len(OPTIONS)):
        differing = (found[row] != expected[row]).nonzero().flatten()
        assert len(differing) <= (1 if options[row][1] < 1 else 0), options[row]


def test_infinite_logits_stay_alone_or_with_their_like() -> None:
    logits = torch.tensor([[1.0, math.inf, 3.0, math.inf], [-math.inf] * 4, [math.nan, -math.inf, 0.0, 1.0]])
    rows, temperature = torch.arange(3, dtype=torch.int32), torch.ones(3)
    for options in ((2, 1.0, 0.0), (1, 0.5, 0.0), (0, 0.5, 0.1), (3, 0.9, 0.0)):
        found, expected = both(logits, rows, rows, temperature, table_of([options] * 3, "cpu"))
        assert torch.equal(found, expected), options


def test_of_equal_tokens_top_p_keeps_the_first() -> None:
    """A flat row of 64 is one bin, which is sorted by place: half of it is the first half."""
    logits, rows = torch.zeros(1, 64), torch.zeros(1, dtype=torch.int32)
    assert truncate_on_cpu(logits, rows, rows, torch.ones(1), table_of([(0, 0.5, 0.0)], "cpu"))
    assert (logits[0] > -math.inf).tolist() == [True] * 32 + [False] * 32


def test_what_it_cannot_read_is_left_to_torch() -> None:
    rows, table = torch.zeros(1, dtype=torch.int32), table_of([(1, 1.0, 0.0)], "cpu")
    assert not truncate_on_cpu(torch.randn(9, 2).t(), rows, rows, torch.ones(1), table)
    assert not truncate_on_cpu(torch.randn(1, 9).double(), rows, rows, torch.ones(1), table)
