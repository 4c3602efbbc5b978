"""Log probabilities equal those of the whole log_softmax."""

from __future__ import annotations

import math

import pytest
import torch

from piecegraph.runner.sampling.logprobs import gather_logprobs, logsumexp_and_ranks_reference
from tests.interpreter import interpreted


def logits_of(num_rows: int, vocab_size: int) -> torch.Tensor:
    logits = 4 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[0, 2:] = -math.inf
    logits[1, : vocab_size // 2] = -math.inf
    logits[2] = logits[2].round()
    return logits


@pytest.mark.parametrize("k", [0, 1, 5, 40, 100])
def test_log_probabilities_equal_those_of_log_softmax(k: int) -> None:
    """The token first, then the likeliest in order; `k` above the vocabulary's size is all of it."""
    logits = logits_of(4, 40)
    tokens = torch.tensor([1, 30, 7, 0])
    found = gather_logprobs(logits, tokens, k)
    everything = logits.log_softmax(-1)
    assert found.token_ids.dtype == torch.int32 and found.token_ids.shape == (4, 1 + min(k, 40))
    assert found.token_ids[:, 0].tolist() == tokens.tolist()
    torch.testing.assert_close(found.logprobs, everything.gather(1, found.token_ids.long()))
    torch.testing.assert_close(found.logprobs[:, 1:], everything.sort(-1, descending=True).values[:, : min(k, 40)])
    assert found.ranks.tolist() == [
        sum(other >= row[token] for other in row) for row, token in zip(everything, tokens, strict=True)
    ]


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = logits_of(4, 4000).to(torch.bfloat16)
    found = gather_logprobs(logits, torch.tensor([1, 3000, 7, 0]), 3)
    expected = logits.double().log_softmax(-1).gather(1, found.token_ids.long())
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=1e-5, atol=1e-5)


def check_kernel(device: str = "cpu") -> None:
    from piecegraph.runner.sampling.kernels.logsumexp import logsumexp_and_ranks_on_gpu

    tokens = torch.tensor([[1], [500], [7], [0]], device=device)
    for dtype in (torch.float32, torch.float16):
        logits = logits_of(4, 700).to(device, dtype)
        expected, found = (torch.empty(4, device=device) for _ in range(2))
        ranks, found_ranks = (torch.empty(4, dtype=torch.int32, device=device) for _ in range(2))
        logsumexp_and_ranks_reference(logits, tokens, expected, ranks)
        logsumexp_and_ranks_on_gpu(logits, tokens, found, found_ranks, block=256)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
        assert torch.equal(found_ranks, ranks)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_kernel)


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpu() -> None:
    check_kernel("cuda")


@pytest.mark.gpu
def test_a_large_batch_on_the_gpu() -> None:
    logits = (3 * torch.randn(256, 151_936, device="cuda")).to(torch.bfloat16)
    tokens = torch.randint(0, 151_936, (256,), device="cuda")
    found = gather_logprobs(logits, tokens, 20)
    expected = logits.double().log_softmax(-1).gather(1, found.token_ids.long())
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.ranks, (logits >= logits.gather(1, tokens.unsqueeze(1))).sum(-1).int())
