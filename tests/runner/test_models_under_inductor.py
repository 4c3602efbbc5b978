"""docs/models_under_inductor.md is about the models that run, and what it says of some of them is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.models_under_inductor import EQUAL, PAGE, compiled, page_of, page_rows, running

ROWS = page_rows(PAGE.read_text(encoding="utf-8"))
NEEDED = 60
"""The fewest architectures whose tokens must be equal."""
SAMPLE = ("bloom", "kimi_linear", "llama4_text")
"""Those compiled here: biased attention; linear and latent attention with experts; products of three dims, and
constants, whose layouts depend on whether there is one token."""


def test_enough_are_equal_and_the_page_is_as_it_is_written() -> None:
    assert sum(row.answer == EQUAL for row in ROWS.values()) >= NEEDED
    assert set(ROWS) <= set(running())
    assert PAGE.read_text(encoding="utf-8").splitlines()[6:] == page_of(ROWS).splitlines()[6:]
    assert all(row.answer.startswith(EQUAL) for row in ROWS.values()), "no token differs"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_tokens_are_equal_with_compiled_pieces(name: str, tmp_path: Path) -> None:
    report = compiled(name, tmp_path)
    assert not report.eager_pieces and report.num_unique_pieces == int(ROWS[name].num_unique_pieces)
