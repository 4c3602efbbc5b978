"""A token is masked exactly when it would complete a bad word of the output."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.options.bad_words import BadWords, forbid_bad_words_reference
from piecegraph.runner.sampling.options.protocol import OptionRequest
from tests.interpreter import interpreted

WORDS: dict[int, list[tuple[int, ...]]] = {
    # state row: its bad words
    0: [(7,), (1, 2, 5), (1, 6)],
    1: [(2, 8)],
    3: [(4, 1, 2, 9), (5, 5, 2, 3), (2, 11), (1, 1), (20, 3)],
}
FORBIDDEN = [[5, 7], [], [9, 11]]
"""Row 1's word begins in its prompt, which does not count; row 3's second word is not what was written, and
token 20 of its last word does not exist."""


def inputs(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    option = BadWords(max_num_reqs=4, vocab_size=12, device=torch.device(device))
    for row, words in WORDS.items():
        request = OptionRequest(params=SamplingParams(), prompt_len=2, stop_token_ids=(), bad_words=words)
        option.stage(row, request)
    option.apply_staged_writes()
    token_ids = torch.full((4, 10), 0x7F7F7F7F, dtype=torch.int32, device=device)
    for row, tokens in ((0, [3, 3, 4, 1, 2]), (1, [1, 2]), (3, [5, 5, 4, 1, 2])):
        token_ids[row, : len(tokens)] = torch.tensor(tokens, device=device)
    logits = torch.zeros(4, 12, device=device)
    selected = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
    idx_mapping = torch.tensor([0, -1, 1, 3], dtype=torch.int32, device=device)
    positions = torch.tensor([5, 0, 2, 5], dtype=torch.int32, device=device)
    return logits, selected, idx_mapping, positions, token_ids, option.table.words


def test_tokens_that_complete_a_bad_word_are_masked() -> None:
    logits, selected, *rest = inputs()
    forbid_bad_words_reference(logits, selected, *rest)
    assert [row.isinf().nonzero().flatten().tolist() for row in logits[selected.long()]] == FORBIDDEN
    assert logits[1].isfinite().all()


def check_kernel(device: str = "cpu") -> None:
    from piecegraph.runner.sampling.kernels.forbid_bad_words import forbid_bad_words_on_gpu

    logits, *rest = inputs(device)
    expected = logits.clone()
    forbid_bad_words_reference(expected, *rest)
    forbid_bad_words_on_gpu(logits, *rest, max_num_words=5)
    assert torch.equal(logits, expected)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_kernel)


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpu() -> None:
    check_kernel("cuda")
