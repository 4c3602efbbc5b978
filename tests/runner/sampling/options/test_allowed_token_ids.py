"""Bits of a mask are tokens, in the kernel and in its reference."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.options.allowed_token_ids import AllowedTokenIds, apply_bitmask_reference
from piecegraph.runner.sampling.options.protocol import OptionRequest
from tests.interpreter import interpreted

VOCAB = 4200  # more than a program looks at, and no multiple of 32
ALLOWED = [0, 31, 32, 63, 1000, 4095, 4096, VOCAB - 1]


def inputs(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    option = AllowedTokenIds(max_num_reqs=4, vocab_size=VOCAB, device=torch.device(device))
    for row, tokens in ((2, ALLOWED), (0, range(VOCAB))):
        params = SamplingParams(allowed_token_ids=tuple(tokens))
        option.stage(row, OptionRequest(params=params, prompt_len=1, stop_token_ids=(), bad_words=()))
    option.apply_staged_writes()
    logits = torch.zeros(3, VOCAB, device=device)
    selected = torch.tensor([0, 2], dtype=torch.int32, device=device)
    idx_mapping = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    return logits, selected, idx_mapping, option.table.words


def test_only_allowed_tokens_are_left() -> None:
    logits, *rest = inputs()
    apply_bitmask_reference(logits, *rest)
    assert logits[0].isfinite().nonzero().flatten().tolist() == ALLOWED
    assert logits[1:].isfinite().all()


def check_kernel(device: str = "cpu") -> None:
    from piecegraph.runner.sampling.kernels.apply_bitmask import apply_bitmask_on_gpu

    logits, *rest = inputs(device)
    expected = logits.clone()
    apply_bitmask_reference(expected, *rest)
    apply_bitmask_on_gpu(logits, *rest)
    assert torch.equal(logits, expected)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_kernel)


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpu() -> None:
    check_kernel("cuda")
