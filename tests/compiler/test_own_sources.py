"""Our own sources are part of keys: of a plan's all that decide, of a piece's those that make its code."""

from __future__ import annotations

from pathlib import Path

import pytest

import piecegraph
from piecegraph.compiler import own_sources
from piecegraph.compiler.own_sources import OF_PIECES, OF_PLANS


def test_every_pattern_names_a_source() -> None:
    root = Path(piecegraph.__file__).parent
    for pattern in (*OF_PLANS, *OF_PIECES):
        assert list(root.glob(pattern)), pattern


def test_a_changed_source_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__.py", "compiler/build.py", "passes/tail.py", "tools/cli.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(piecegraph, "__file__", str(tmp_path / "__init__.py"))
    digest = own_sources.digest_of_own_sources.__wrapped__
    plans, pieces = digest(OF_PLANS), digest(OF_PIECES)
    (tmp_path / "tools" / "cli.py").write_text("another")
    assert digest(OF_PLANS) == plans
    (tmp_path / "compiler" / "build.py").write_text("another")
    assert (digest(OF_PLANS) == plans, digest(OF_PIECES) == pieces) == (False, True)
    (tmp_path / "passes" / "tail.py").write_text("another")
    assert digest(OF_PIECES) != pieces
