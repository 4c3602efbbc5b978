from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.paths import cache_root


def test_the_variable_decides_where_caches_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()


def test_a_relative_folder_is_made_absolute_and_home_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", "mine")
    assert cache_root() == tmp_path / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", "~/mine")
    assert cache_root() == tmp_path / "mine"


def test_without_it_the_platform_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIECEGRAPH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root().name == "piecegraph"
    assert cache_root().is_relative_to(tmp_path)
