"""Which static piece runs at which sizes, decided without compiling anything."""

from __future__ import annotations

import pytest

from piecegraph.compiler.static_piece import choose_static

TOKENS, LOGITS = "u0", "u1"
SYMBOLS = (frozenset({TOKENS}), frozenset({TOKENS, LOGITS}), frozenset[str](), frozenset({"u9"}))
AVAILABLE = {(unique, size): None for unique in (0, 1) for size in (1, 4)}


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ({TOKENS: 1, LOGITS: 1}, (1, 1, None, None)),
        ({TOKENS: 4, LOGITS: 4}, (4, 4, None, None)),
        ({TOKENS: 4, LOGITS: 1}, (4, None, None, None)),  # both are sizes, but not the same
        ({TOKENS: 3, LOGITS: 4}, (None, None, None, None)),
        ({TOKENS: 2, LOGITS: 2}, (None, None, None, None)),
        ({}, (None, None, None, None)),
    ],
)
def test_a_static_piece_runs_only_where_every_size_is_its_own(
    sizes: dict[str, int], chosen: tuple[int | None, ...]
) -> None:
    assert choose_static(SYMBOLS, AVAILABLE, sizes) == chosen


def test_one_that_failed_is_not_chosen() -> None:
    available = {key: None for key in AVAILABLE if key != (0, 4)}
    assert choose_static(SYMBOLS, available, {TOKENS: 4, LOGITS: 4}) == (None, 4, None, None)
