"""Drafts by prompt lookup, against a loop over all places of a text."""

from __future__ import annotations

from random import Random

import pytest
import torch

from piecegraph.runner.speculative.ngram import propose_ngrams


def by_loop(tokens: list[int], num_drafts: int, shortest: int, longest: int) -> list[int]:
    """The tokens after the earliest occurrence of the longest suffix that occurs before."""
    for size in range(longest, shortest - 1, -1):
        for end in range(size, len(tokens)):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + num_drafts]
    return []


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 5), (3, 3)])
def test_drafts_follow_the_longest_match_that_is_earliest(shortest: int, longest: int) -> None:
    random = Random(shortest * 10 + longest)
    texts = [[random.randrange(3) for _ in range(length)] for length in [1, 2, 3, 5, 12, 20, 20, 20, 7, 20]]
    rows = torch.full((len(texts), 20), 1, dtype=torch.int32)  # behind a text is anything
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    drafts, count = propose_ngrams(
        rows, torch.tensor(list(map(len, texts))), num_drafts=4, shortest=shortest, longest=longest
    )
    expected = [by_loop(text, 4, shortest, longest) for text in texts]
    assert [row[:n].tolist() for row, n in zip(drafts, count.tolist(), strict=True)] == expected
    assert any(expected) and not all(expected)


def test_a_row_without_tokens_has_no_drafts() -> None:
    _, count = propose_ngrams(
        torch.zeros(2, 8, dtype=torch.int32), torch.tensor([0, 3]), num_drafts=2, shortest=1, longest=2
    )
    assert count.tolist() == [0, 1]
