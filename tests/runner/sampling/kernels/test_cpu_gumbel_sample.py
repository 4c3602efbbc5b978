"""The C++ kernel draws what the reference draws, but for near ties, which logarithms may decide."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.common.token_record import TokenRecord, record_tokens
from piecegraph.runner.sampling.gumbel_sample import gumbel_noise, gumbel_sample, gumbel_sample_reference
from piecegraph.runner.sampling.kernels.cpu_gumbel_sample import KERNEL, gumbel_sample_on_cpu
from tests.cpp_kernels import needs_cpp_compiler, use_kernel
from tests.runner.sampling.test_gumbel_sample import awkward_logits, state

pytestmark = needs_cpp_compiler


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(KERNEL, monkeypatch)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The state row of each row, temperatures and seeds by state row, positions."""


def drawn(logits: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of the kernel and those of the reference."""
    found, expected = (torch.full((len(logits),), -7) for _ in range(2))
    assert gumbel_sample_on_cpu(logits, *inputs, found)
    gumbel_sample_reference(logits, *inputs, expected)
    return found, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_awkward_rows_are_drawn_as_the_reference_draws_them(dtype: torch.dtype) -> None:
    inputs = state(9)
    idx_mapping = torch.tensor([3, 1, -1, 0, 2, 4, 6, 8, 7], dtype=torch.int32)
    positions = torch.arange(9, dtype=torch.int32) * 2**27
    logits = awkward_logits()
    logits[7, 40] = float("inf")
    found, expected = drawn(logits.to(dtype), (idx_mapping, inputs["temperature"], inputs["seeds"], positions))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 511, 512, 513, 49152])
def test_draws_are_the_best_tokens_of_the_reference(vocab_size: int) -> None:
    """With any seeds and positions: no other token is ahead of the drawn one by more than logarithms are off."""
    random = torch.Generator().manual_seed(vocab_size)
    num_rows = 40
    logits = torch.randn(num_rows, vocab_size, generator=random) * 2
    temperature = torch.rand(num_rows, generator=random) * 2 + 0.01
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=random)
    positions = torch.randint(0, 2**31 - 1, (num_rows,), generator=random, dtype=torch.int32)
    idx_mapping = torch.randperm(num_rows, generator=random).int()
    found, _ = drawn(logits, (idx_mapping, temperature, seeds, positions))
    row = idx_mapping.long()
    scores = logits / temperature[row].unsqueeze(1) + gumbel_noise(seeds[row], positions.long(), vocab_size)
    lead = scores.amax(-1) - scores.gather(1, found.unsqueeze(1)).squeeze(1)
    assert float(lead.max()) <= 1e-5 * float(scores.abs().max())


def test_greedy_rows_take_the_first_of_the_largest() -> None:
    logits = torch.randn(4, 2000).round()
    rows = torch.arange(4, dtype=torch.int32)
    found, _ = drawn(logits, (rows, torch.zeros(4), torch.zeros(4, dtype=torch.int64), rows))
    first = [(row == row.max()).nonzero()[0].item() for row in logits]
    assert found.tolist() == first


def test_a_row_is_drawn_alike_among_any_others_and_by_any_number_of_threads() -> None:
    logits = torch.randn(7, 3000)
    inputs = state(7)
    rows, positions = torch.arange(7, dtype=torch.int32), torch.full((7,), 5, dtype=torch.int32)
    together = gumbel_sample(logits, idx_mapping=rows, positions=positions, **inputs)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(gumbel_sample(logits, idx_mapping=rows, positions=positions, **inputs), together)
    finally:
        torch.set_num_threads(before)
    apart = [
        gumbel_sample(logits[at : at + 1], idx_mapping=rows[at : at + 1], positions=positions[:1], **inputs).item()
        for at in range(7)
    ]
    assert apart == together.tolist()


def test_draws_follow_the_distribution() -> None:
    """20,000 positions over five tokens: frequencies within four standard errors."""
    count, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    rows, temperature = torch.zeros(count, dtype=torch.int32), torch.tensor([0.8])
    inputs = rows, temperature, torch.tensor([11]), torch.arange(count, dtype=torch.int32)
    found, _ = drawn(logits.repeat(count, 1), inputs)
    wanted = (logits / 0.8).softmax(-1)
    frequency = torch.bincount(found, minlength=5) / count
    assert ((frequency - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_what_it_cannot_read_is_left_to_torch() -> None:
    idx, temperature = torch.zeros(2, dtype=torch.int32), torch.zeros(1)
    inputs = idx, temperature, torch.zeros(1, dtype=torch.int64), idx
    out = torch.zeros(2, dtype=torch.int64)
    assert not gumbel_sample_on_cpu(torch.randn(2, 9).half(), *inputs, out)
    assert not gumbel_sample_on_cpu(torch.randn(9, 2).t(), *inputs, out)
    assert gumbel_sample_on_cpu(torch.randn(2, 19)[:, 3:12], *inputs, out)
    assert gumbel_sample_on_cpu(torch.empty(0, 9), *inputs, out[:0])


def test_tokens_are_recorded_as_by_torch() -> None:
    """Rows of the record lie in wider ones; some requests do not sample yet, and some have their last token."""
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        num_rows, size = 8, 12
        wide = torch.randint(0, 50, (num_rows, size + 4), generator=random, dtype=torch.int32)
        lens = torch.randint(1, size, (num_rows,), generator=random, dtype=torch.int32)
        idx_mapping = torch.randperm(num_rows, generator=random)[:6].int()
        idx_mapping[2] = -1
        positions = torch.randint(0, size + 2, (6,), generator=random, dtype=torch.int32)
        inputs = idx_mapping, torch.rand(num_rows), torch.arange(num_rows), positions
        records = [
            TokenRecord(wide.clone()[:, :size], lens, torch.zeros(num_rows, dtype=torch.int32)) for _ in range(2)
        ]
        out = torch.zeros(6, dtype=torch.int64)
        assert gumbel_sample_on_cpu(torch.randn(6, 30, generator=random), *inputs, out, records[0])
        record_tokens(records[1], out, idx_mapping=idx_mapping, positions=positions)
        for found, expected in zip(*records, strict=True):
            assert torch.equal(found, expected)
        whole = records[0].token_ids.as_strided(wide.shape, wide.stride())
        assert torch.equal(whole[:, size:], wide[:, size:])
