"""Quarantine: bad files are out of the way, can be listed, and can be thrown out."""

from __future__ import annotations

from pathlib import Path

from piecegraph.cache.quarantine import clear_quarantine, quarantine, quarantined
from tests.cache.cache_roots import a_store, saved


def test_what_is_moved_there_says_what_it_was(tmp_path: Path) -> None:
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
