from __future__ import annotations

from pathlib import Path

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import CacheCommand, save_piece


def test_keys_are_made_and_carry_an_archive(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    private, public = tmp_path / "image.key", tmp_path / "image.key.pub"
    assert cache.json("keygen", str(private)) == {"private": str(private), "public": str(public)}
    save_piece(store, "one")
    cache("export", str(tmp_path / "file"), "--all", "--signing-key", str(private))
    elsewhere = ("--cache-dir", str(tmp_path / "elsewhere"))
    assert cache.json("import", str(tmp_path / "file"), "--signing-key", str(public), *elsewhere)["signed"] is True
    cache("import", str(tmp_path / "file"), code=1)
    assert "is not signed by a key that you hold" in cache.err


def test_an_existing_file_is_not_overwritten(cache: CacheCommand, tmp_path: Path) -> None:
    (tmp_path / "image.key").write_text("precious")
    assert cache("keygen", str(tmp_path / "image.key"), code=1) == ""
    assert "is there already" in cache.err
    assert (tmp_path / "image.key").read_text() == "precious"


def test_a_folder_that_is_not_there_is_named(cache: CacheCommand, tmp_path: Path) -> None:
    cache("keygen", str(tmp_path / "none" / "image.key"), code=1)
    assert f"{tmp_path / 'none' / 'image.key'} cannot be written" in cache.err
    assert list(tmp_path.glob("none*")) == []
