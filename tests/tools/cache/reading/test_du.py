from __future__ import annotations

from pathlib import Path

from piecegraph.cache.store.store import Store
from piecegraph.tools.cache.entries.usage import usage
from tests.tools.cache.models import CacheCommand, save_model, save_piece


def test_room_by_folder_and_by_model(store: Store, cache: CacheCommand, cache_dir: Path) -> None:
    """OWN is what removing the model frees."""
    first, second = save_model(store, "First"), save_model(store, "Second")
    save_piece(store, "alone")
    record = cache.json("du")
    found = usage(store.layout)
    assert (record["path"], record["total_bytes"]) == (str(cache_dir), found.total_bytes)
    assert record["blobs"] == {"files": found.blobs.files, "bytes": found.blobs.bytes}
    rooms = {room["model"]: room for room in record["models"]}
    assert set(rooms) == {"First 134.5M bfloat16", "Second 134.5M bfloat16", None}
    assert [room["entries"] for room in rooms.values()] == [3, 3, 1]
    for model in (first, second):
        room = rooms[f"{model.plan.notes['model']} 134.5M bfloat16"]
        own = {"source": model.plan.blobs["source"].size}  # the rest of a plan is the same for both
        assert room["own_bytes"] == store.layout.entry(model.plan.key).stat().st_size + sum(own.values())
        assert room["bytes"] > room["own_bytes"]


def test_as_text(store: Store, cache: CacheCommand) -> None:
    save_model(store, "First")
    lines = cache("du").splitlines()
    assert lines[0].split() == ["WHAT", "FILES", "SIZE"]
    assert [line.split("  ")[0] for line in lines[1:6]] == ["entries", "blobs", "quarantine", "being written", "other"]
    assert lines[6].startswith("total ")
    assert lines[6].endswith("; at most 10.0 GiB are kept")
    assert lines[8].split() == ["MODEL", "ENTRIES", "SIZE", "OWN"]
    assert lines[9].startswith("First 134.5M bfloat16        3")


def test_no_cache(cache: CacheCommand) -> None:
    record = cache.json("du")
    assert (record["total_bytes"], record["models"]) == (0, [])
    assert "there is no cache at" in cache.err
