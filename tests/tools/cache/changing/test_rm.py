from __future__ import annotations

import io

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import CacheCommand, save_kernels, save_model, save_piece


def test_a_model_goes_with_its_pieces(store: Store, cache: CacheCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """All their bytes go too, once no writer can be about to need them."""
    model, kept = save_model(store, eps=0.5), save_model(store, "other")
    everything = cache.json("du")
    monkeypatch.setattr("piecegraph.cache.upkeep.collect.FRESH_S", -1.0)
    record = cache.json("rm", model.plan.key[:12], "-y")
    assert record["removed"] == [model.plan.key, *(piece.key for piece in model.pieces)]
    assert [row["key"] for row in cache.json("ls")] == [kept.plan.key]
    assert record["freed_bytes"] == everything["total_bytes"] - cache.json("du")["total_bytes"]


def test_pieces_of_others_stay(store: Store, cache: CacheCommand) -> None:
    model, other = save_model(store, "First"), save_model(store, "Second")
    assert cache.json("rm", model.plan.key, "-y")["removed"] == [model.plan.key]
    assert [row["state"] for row in cache.json("ls")] == ["complete"]
    assert store.exists(other.pieces[0].key)


def test_kernels_go_with_their_model(store: Store, cache: CacheCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(store)
    kernels = save_kernels(store, model.plan.key, "add")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    cache("rm", model.plan.key)
    assert f"Remove {model.plan.key[:12]} and 3 entries of their own pieces and kernels?" in cache.err
    assert not store.exists(kernels.key)


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1), ("\n", 1, 1)])
def test_removing_asks_first(
    store: Store, cache: CacheCommand, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: int
) -> None:
    """The question is on stderr, because stdout is data."""
    key = save_piece(store, "one").key
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    out = cache("rm", key, code=code)
    assert f"Remove {key[:12]}? [y/N]" in cache.err
    assert ("nothing was removed" in cache.err) == bool(left)
    assert "Remove" not in out
    assert len(cache.json("ls")) == left


def test_without_an_answer_nothing_is_removed(
    store: Store, cache: CacheCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = save_piece(store, "one").key
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    cache("rm", key, code=2)
    assert "Nobody is here to answer; say yes with -y." in cache.err
    assert store.exists(key)


def test_an_unknown_key_removes_nothing(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "one").key
    cache("rm", key, "0123456789", "-y", code=2)
    assert store.exists(key)


def test_a_corrupt_entry_can_be_removed(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "one").key
    store.layout.entry(key).write_bytes(b"{")
    assert cache("rm", key, "-y").startswith("removed 1 entries, ")
