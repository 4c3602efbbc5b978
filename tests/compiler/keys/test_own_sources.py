"""Keys contain a digest of our own sources: for a plan all that decide, for a piece those that make its code."""

from __future__ import annotations

from pathlib import Path

import pytest

import piecegraph
from piecegraph.compiler.keys import own_sources
from piecegraph.compiler.keys.own_sources import PIECE_SOURCES, PLAN_SOURCES


def test_every_pattern_names_a_source() -> None:
    root = Path(piecegraph.__file__).parent
    for pattern in (*PLAN_SOURCES, *PIECE_SOURCES):
        assert list(root.glob(pattern)), pattern


def test_a_changed_source_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__.py", "compiler/building/build.py", "passes/select_rows_early.py", "tools/cli.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(piecegraph, "__file__", str(tmp_path / "__init__.py"))
    digest = own_sources.digest_of_own_sources.__wrapped__
    plans, pieces = digest(PLAN_SOURCES), digest(PIECE_SOURCES)
    (tmp_path / "tools" / "cli.py").write_text("another")
    assert digest(PLAN_SOURCES) == plans
    (tmp_path / "compiler" / "building" / "build.py").write_text("another")
    assert (digest(PLAN_SOURCES) == plans, digest(PIECE_SOURCES) == pieces) == (False, True)
    (tmp_path / "passes" / "select_rows_early.py").write_text("another")
    assert digest(PIECE_SOURCES) != pieces
