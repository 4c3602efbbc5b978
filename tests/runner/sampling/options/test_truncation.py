"""The kernel of min_p, top_k and top_p keeps what its reference keeps, which sorts."""

from __future__ import annotations

import math

import pytest
import torch

from piecegraph.runner.sampling.options.staged_rows import float_word
from piecegraph.runner.sampling.options.truncation import truncate_reference
from tests.interpreter import interpreted

OPTIONS = [
    # top_k, top_p, min_p
    (5, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.1),
    (20, 0.5, 0.0),
    (3, 0.5, 0.01),
    (150, 0.95, 0.0),
    (2, 0.99, 0.9),
    (0, 0.999, 0.0),
    (1, 1.0, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 1.0),
    (250, 0.8, 1e-9),
]


def table_of(options: list[tuple[int, float, float]], device: str) -> torch.Tensor:
    words = [(k, float_word(p), float_word(math.log(m) if m else -math.inf)) for k, p, m in options]
    return torch.tensor(words, dtype=torch.int32, device=device)


def awkward_logits() -> torch.Tensor:
    """A row for each of OPTIONS in each of four shapes: peaked, flat with ties, flat without, mostly -inf."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4, len(OPTIONS), 300, generator=random)
    logits[0] *= 5
    logits[1] = (logits[1] * 2).round() / 4
    logits[2] *= 0.01
    logits[3, :, 4:] = -math.inf
    logits[3, :, 0] = math.nan
    return logits.flatten(0, 1)


def check_kernel(device: str = "cpu") -> None:
    """With room for copies, and with so little of it that rows are bisected whole."""
    from piecegraph.runner.sampling.kernels.truncate import truncate_on_gpu

    logits = awkward_logits().to(device)
    num_reqs = logits.shape[0]
    rows = torch.arange(num_reqs, dtype=torch.int32, device=device)
    idx_mapping = rows.flip(0)
    table = table_of(OPTIONS * 4, device).flip(0).contiguous()
    temperature = torch.tensor([0.7, 1.0, 1.9], device=device).repeat(num_reqs)[:num_reqs]
    selected = rows[rows % 8 != 3]
    expected = logits.clone()
    truncate_reference(expected, selected, idx_mapping, temperature, table)
    untouched = logits[3].nan_to_num(1e9)
    for max_candidates, some in ((512, selected[::2].clone()), (32, selected[1::2].clone())):
        found = logits.clone()
        truncate_on_gpu(found, some, idx_mapping, temperature, table, block=256, max_candidates=max_candidates)
        is_other = (found.nan_to_num(1e9) != expected.nan_to_num(1e9)).any(-1)[some.long()]
        differing = some[is_other].tolist()
        assert not differing, [(OPTIONS[i % len(OPTIONS)], i // len(OPTIONS), max_candidates) for i in differing]
        assert torch.equal(found[3].nan_to_num(1e9), untouched), "rows not selected stay as they are"


@pytest.mark.slow
def test_the_kernel_keeps_what_the_reference_keeps() -> None:
    interpreted(check_kernel)


@pytest.mark.gpu
def test_the_kernel_keeps_what_the_reference_keeps_on_the_gpu() -> None:
    check_kernel("cuda")


def test_of_equal_tokens_the_first_stay() -> None:
    """At top_p; at top_k all of them do, since none is likelier than another."""
    logits = torch.zeros(2, 10)
    rows = torch.arange(2, dtype=torch.int32)
    truncate_reference(logits, rows, rows, torch.ones(2), table_of([(0, 0.35, 0.0), (3, 1.0, 0.0)], "cpu"))
    assert logits.isfinite().sum(-1).tolist() == [4, 10]
    assert logits[0, :4].isfinite().all()


VOCAB = 151_936


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.1, 3.0, 10.0])
def test_a_large_batch_on_the_gpu(spread: float) -> None:
    """Kept sets are the reference's, but for tokens at the very edge, where sums of probabilities round."""
    from piecegraph.runner.sampling.kernels.truncate import truncate_on_gpu

    options = ([(k, p, m) for k in (0, 50, 5000) for p in (1.0, 0.95, 0.5) for m in (0.0, 0.05)] * 15)[:256]
    logits = (spread * torch.randn(256, VOCAB, device="cuda")).to(torch.bfloat16).float()
    rows = torch.arange(256, dtype=torch.int32, device="cuda")
    temperature = torch.full((256,), 0.8, device="cuda")
    expected, found = logits.clone(), logits.clone()
    truncate_reference(expected, rows, rows, temperature, table_of(options, "cuda"))
    truncate_on_gpu(found, rows, rows, temperature, table_of(options, "cuda"))
    is_other = found != expected
    # Two sums of float32 differ by some 1e-6 of the whole; so may the tokens between them.
    probability = (logits.double() / 0.8).softmax(-1)
    kept = (probability * expected.isfinite()).sum(-1)
    assert ((probability * is_other).sum(-1) <= 1e-4 * kept + probability.amax(-1) * 1e-3).all()
    exact = [i for i, (_, p, _) in enumerate(options) if p == 1.0]
    assert not is_other[exact].any(), "no sums are involved"
    assert torch.equal(found.masked_fill(found == -math.inf, 0), logits.masked_fill(found == -math.inf, 0))
