from __future__ import annotations

from piecegraph.cache.disk.layout import Layout
from piecegraph.cache.store.store import Store
from piecegraph.cache.trust.quarantine import quarantine
from piecegraph.tools.cache.entries.usage import Room, usage
from tests.tools.cache.models import save_piece


def test_every_file_is_counted_where_it_lies(store: Store) -> None:
    entry = save_piece(store, "one")
    (store.layout.temp / "x.tmp").write_bytes(b"1234")
    bad = store.layout.blob(entry.blobs["code"].digest)
    size = bad.stat().st_size
    assert quarantine(store.layout, bad, "blob")
    found = usage(store.layout)
    files = [path for path in store.layout.root.rglob("*") if path.is_file()]
    assert found.total_bytes == sum(path.stat().st_size for path in files)
    assert (found.entries.files, found.blobs.files, found.temp, found.quarantine) == (1, 4, Room(1, 4), Room(1, size))
    assert found.other.files == 2  # a stamp, and the record of events


def test_a_missing_cache_uses_nothing(store: Store) -> None:
    assert usage(Layout(store.layout.root / "none")).total_bytes == 0
