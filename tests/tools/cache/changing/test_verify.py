from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import CacheCommand, save_model, save_piece
from tests.tools.cache.reading.test_ls import rewrite


def test_all_is_well(store: Store, cache: CacheCommand) -> None:
    model = save_model(store)
    rows = cache.json("verify")
    assert {row["key"] for row in rows} == {model.plan.key, *(piece.key for piece in model.pieces)}
    assert {(row["result"], row["reason"], row["detail"]) for row in rows} == {("ok", "", "")}
    assert cache("verify").splitlines()[-1] == "3 ok, 0 corrupt, 0 untrusted, 0 not verified"


def test_a_blob_with_another_bit_is_corrupt(store: Store, cache: CacheCommand) -> None:
    entry = save_piece(store, "one")
    path = store.layout.blob(entry.blobs["artifact"].digest)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    (row,) = cache.json("verify", code=1)
    assert (row["result"], row["reason"]) == ("corrupt", "blob corrupt")
    assert row["detail"].startswith("artifact (")


def test_a_blob_that_is_gone_is_corrupt(store: Store, cache: CacheCommand) -> None:
    store.layout.blob(save_piece(store, "one").blobs["code"].digest).unlink()
    assert [row["reason"] for row in cache.json("verify", code=1)] == ["blob missing"]


def test_a_signature_that_does_not_fit_is_untrusted(store: Store, cache: CacheCommand) -> None:
    """An entry with right digests and no valid signature was planted, or damaged."""
    key = save_piece(store, "one").key
    rewrite(store, key, {"notes": {}}, sign=False)
    assert [(row["result"], row["reason"]) for row in cache.json("verify", code=2)] == [("untrusted", "forged")]


def test_what_another_user_signed_is_untrusted(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    save_piece(store, "one")
    key_file = tmp_path / "data" / "piecegraph" / "cache.key"
    other = tmp_path / "other.key"
    key_file.rename(other)
    assert [row["reason"] for row in cache.json("verify", code=2)] == ["untrusted"]
    assert [row["result"] for row in cache.json("verify", "--signing-key", str(other))] == ["ok"]


def test_another_version_is_not_verified(store: Store, cache: CacheCommand) -> None:
    rewrite(store, save_piece(store, "one").key, {"format": 99}, sign=True)
    assert [row["reason"] for row in cache.json("verify", code=4)] == ["other version"]


def test_a_plan_whose_pieces_are_gone_is_not_verified(store: Store, cache: CacheCommand) -> None:
    model = save_model(store)
    store.delete(model.pieces[0].key)
    rows = {row["key"]: row for row in cache.json("verify", code=4)}
    assert rows[model.plan.key]["reason"] == "pieces missing"
    assert rows[model.pieces[1].key]["result"] == "ok"


def test_the_exit_code_is_the_sum_of_its_bits(store: Store, cache: CacheCommand) -> None:
    good, corrupt, forged, foreign = (save_piece(store, name).key for name in ("a", "b", "c", "d"))
    store.layout.entry(corrupt).write_bytes(b"{")
    rewrite(store, forged, {"notes": {}}, sign=False)
    rewrite(store, foreign, {"format": 99}, sign=True)
    out = cache("verify", code=7)
    assert out.splitlines()[-1] == "1 ok, 1 corrupt, 1 untrusted, 1 not verified"
    assert [row["key"] for row in cache.json("verify", good[:12])] == [good]
    cache("verify", corrupt, foreign, code=5)


def test_verifying_changes_nothing(store: Store, cache: CacheCommand) -> None:
    """No stamp and no count changes, and bad files stay where they are until they are next looked up."""
    path = store.layout.entry(save_piece(store, "one").key)
    path.write_bytes(b"{")
    before = {file: file.stat().st_mtime_ns for file in store.layout.base.rglob("*")}
    cache("verify", code=1)
    assert {file: file.stat().st_mtime_ns for file in store.layout.base.rglob("*")} == before


def test_a_key_that_is_not_there_could_not_be_verified(store: Store, cache: CacheCommand) -> None:
    save_piece(store, "one")
    cache("verify", "0000ffff0000", code=4)
    assert "no key begins with '0000ffff0000'" in cache.err


def test_a_folder_that_others_may_write_is_untrusted(store: Store, cache: CacheCommand, cache_dir: Path) -> None:
    save_piece(store, "one")
    cache_dir.chmod(0o770)
    cache("verify", code=2)
    assert "Run: chmod go-w" in cache.err


def test_a_disk_that_cannot_be_read_is_no_verdict(cache: CacheCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> Store:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Store, "open", fails)
    cache("verify", code=4)
    assert "Input/output error" in cache.err


def test_nothing_to_verify(cache: CacheCommand) -> None:
    assert cache.json("verify") == []
    assert cache("verify") == ""
    assert "there is no cache" in cache.err
