from __future__ import annotations

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import CacheCommand, save_piece


def test_stats_count_hits_misses_and_seconds_saved(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "one").key
    for _ in range(3):
        store.load(key)
    store.load("0" * 64)
    store.layout.entry(key).write_bytes(b"{")
    store.load(key)
    with store.layout.counters.open("ab") as record:
        record.write(b"torn by a cra")
    assert cache.json("stats") == {
        "hits": 3,
        "misses": {"absent": 1, "corrupt": 1},
        "hit_rate": pytest.approx(0.6),
        "seconds_saved": pytest.approx(7.5),
        "saves": 1,
        "quarantined": 1,
        "unreadable_lines": 1,
        "is_complete": True,
    }
    assert cache("stats").splitlines() == [
        "hits         3  (60.0% of 5)",
        "misses       2",
        "  1 absent",
        "  1 corrupt",
        "saved        7.5 s of compiling",
        "stored       1",
        "quarantined  1",
        "unreadable   1 lines of the record",
    ]


def test_before_anything_was_looked_up(cache: CacheCommand) -> None:
    record = cache.json("stats")
    assert (record["hits"], record["misses"], record["hit_rate"]) == (0, {}, None)
    assert "nothing was looked up yet" in cache.err
    assert cache("stats").startswith("hits         0\n")


def test_a_record_that_is_full_says_so(store: Store, cache: CacheCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    store.load(save_piece(store, "one").key)
    monkeypatch.setattr("piecegraph.cache.disk.counters.MAX_COUNTERS_BYTES", 10)
    assert cache.json("stats")["is_complete"] is False
    assert "what came after is not counted" in cache.err
