"""A cache directory and a user for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import CacheCommand


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `PIECEGRAPH_CACHE_DIR` names, which does not exist yet."""
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "cache"


@pytest.fixture
def store(cache_dir: Path) -> Store:
    """A store as a compiler would open it."""
    return Store.open(cache_dir)


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> CacheCommand:
    return CacheCommand(capsys)
