from __future__ import annotations

from pathlib import Path

from tests.tools.cache.models import CacheCommand


def test_the_folder_alone_is_on_stdout(cache: CacheCommand, cache_dir: Path) -> None:
    """`cd $(piecegraph cache path)` works."""
    assert cache("path") == f"{cache_dir}\n"
    assert cache.err == "set by PIECEGRAPH_CACHE_DIR\n"


def test_as_json(cache: CacheCommand, cache_dir: Path, tmp_path: Path) -> None:
    assert cache.json("path") == {"path": str(cache_dir), "set_by": "PIECEGRAPH_CACHE_DIR", "exists": False}
    assert cache.json("path", "--cache-dir", str(tmp_path)) == {
        "path": str(tmp_path),
        "set_by": "--cache-dir",
        "exists": True,
    }
    assert cache.err == ""
