"""Quarantine: bad files are out of the way, can be listed, and can be thrown out."""

from __future__ import annotations

from pathlib import Path

from piecegraph.cache.trust.quarantine import clear_quarantine, quarantine, quarantined, remove
from tests.cache.cache_roots import a_store, saved


def test_a_quarantined_file_keeps_its_kind_and_key(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    digest = entry.blobs["plan"].digest
    assert quarantined(store.layout) == ()
    assert quarantine(store.layout, store.layout.entry(entry.key), "entry")
    assert quarantine(store.layout, store.layout.blob(digest), "blob")
    assert not quarantine(store.layout, store.layout.blob(digest), "blob")
    assert {(bad.kind, bad.of) for bad in quarantined(store.layout)} == {("entry", entry.key), ("blob", digest)}


def test_clearing_removes_folders_and_links_and_follows_none(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    saved(store)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    (store.layout.quarantine / "entry.folder.0").mkdir()
    (store.layout.quarantine / "entry.link.0").symlink_to(tmp_path / "mine")
    assert clear_quarantine(store.layout) == 2
    assert clear_quarantine(store.layout) == 0
    assert (tmp_path / "mine" / "file").exists()


def test_a_folder_under_a_name_of_ours_is_moved_and_a_file_removed(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    path = store.layout.entry(saved(store).key)
    assert remove(store.layout, path, "entry")
    assert not remove(store.layout, path, "entry")
    path.mkdir()
    (path / "x").write_text("x")
    assert remove(store.layout, path, "entry")
    assert not path.exists()
    assert [bad.kind for bad in quarantined(store.layout)] == ["entry"]
