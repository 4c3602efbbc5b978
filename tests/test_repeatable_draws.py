"""What hypothesis draws for a test depends on the test alone."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def drawn() -> list[tuple[int, str]]:
    found = []

    @given(st.integers(), st.text())
    def keep(number: int, text: str) -> None:
        found.append((number, text))

    keep()
    return found


def test_draws_do_not_depend_on_the_loaded_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    source = tmp_path / "full_of_constants.py"
    source.write_text("\n".join(f"_{number} = {number}, 'text {number}'" for number in range(12_345, 12_845)))
    module = types.ModuleType(source.stem)
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, source.stem, module)
    assert drawn() == before and len(before) == 100
