"""`cache export` and `cache import`, from one user's cache to another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.cache.store.entry import BlobRef
from piecegraph.cache.store.store import Loaded, Store
from tests.tools.cache.models import CacheCommand, save_kernels, save_model, save_piece


@pytest.fixture
def archive(store: Store, cache: CacheCommand, tmp_path: Path) -> Path:
    """An exported model with its pieces; beside it in the cache is another entry."""
    model = save_model(store)
    save_piece(store, "other")
    file = tmp_path / "model.pgcache"
    record = cache.json("export", str(file), model.plan.key[:12])
    assert record == {
        "file": str(file),
        "keys": [model.plan.key, *(piece.key for piece in model.pieces)],
        "bytes": file.stat().st_size,
    }
    return file


def as_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "theirs"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "their data"))
    return Store.open(tmp_path / "theirs")


def test_ones_own_archive_comes_back(archive: Path, store: Store, cache: CacheCommand) -> None:
    cache("clear", "-y")
    record = cache.json("import", str(archive))
    assert (record["file"], len(record["keys"]), record["signed"]) == (str(archive), 3, True)
    assert all(isinstance(store.load(key), Loaded) for key in record["keys"])
    assert cache("import", str(archive)) == "took 3 entries, signed by a key you hold\n"


def test_kernels_go_along(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    model = save_model(store)
    kernels = save_kernels(store, model.plan.key, "add")
    keys = cache.json("export", str(tmp_path / "model.pgcache"), model.plan.key)["keys"]
    assert keys == [model.plan.key, *(piece.key for piece in model.pieces), kernels.key]
    cache("clear", "-y")
    cache("import", str(tmp_path / "model.pgcache"))
    found = store.load(kernels.key)
    assert isinstance(found, Loaded)
    assert {role: BlobRef.of(data) for role, data in found.blobs.items()} == kernels.blobs


def test_a_strangers_archive_needs_trust_or_a_key(
    archive: Path, cache: CacheCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = as_another_user(tmp_path, monkeypatch)
    cache("import", str(archive), code=1)
    assert "is not signed by a key that you hold" in cache.err
    assert "--trust" in cache.err
    assert not theirs.layout.root.exists()
    key_file = tmp_path / "data" / "piecegraph" / "cache.key"
    assert cache.json("import", str(archive), "--signing-key", str(key_file))["signed"] is True
    assert cache.json("import", str(archive), "--trust")["signed"] is False
    assert cache("verify").splitlines()[-1] == "3 ok, 0 corrupt, 0 untrusted, 0 not verified"


@pytest.mark.parametrize("where", [-1, 100, 40])
@pytest.mark.parametrize("options", [(), ("--trust",)])
def test_a_tampered_archive_is_refused_before_a_byte_is_written(
    archive: Path, cache: CacheCommand, cache_dir: Path, where: int, options: tuple[str, ...]
) -> None:
    cache("clear", "-y")
    data = bytearray(archive.read_bytes())
    data[where] ^= 1
    archive.write_bytes(data)
    cache("import", str(archive), *options, code=1)
    assert str(archive) in cache.err
    assert cache.json("du")["total_bytes"] == 0


def test_a_file_that_is_not_an_archive_is_refused(cache: CacheCommand, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    cache("import", str(tmp_path / "text"), code=1)
    assert "is not an archive of this version of piecegraph (`piecegraph cache export`)" in cache.err
    cache("import", str(tmp_path / "none"), code=2)
    assert "does not exist" in cache.err


def test_everything(archive: Path, cache: CacheCommand, tmp_path: Path) -> None:
    assert cache("export", str(tmp_path / "all"), "--all").startswith("wrote 4 entries, ")


def test_an_entry_that_is_not_whole_is_not_exported(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    entry = save_piece(store, "one")
    store.layout.blob(entry.blobs["code"].digest).unlink()
    cache("export", str(tmp_path / "file"), entry.key, code=1)
    assert f"entry {entry.key} cannot be exported: it is blob missing" in cache.err
    assert not (tmp_path / "file").exists()


def test_a_file_that_cannot_be_written(archive: Path, cache: CacheCommand, tmp_path: Path) -> None:
    cache("export", str(tmp_path / "none" / "file"), "--all", code=1)
    assert f"error: {tmp_path}/none/file cannot be written: [Errno 2] No such file or directory" in cache.err


def test_an_empty_cache_is_not_exported(cache: CacheCommand, tmp_path: Path) -> None:
    assert cache.json("export", str(tmp_path / "file"), "--all")["keys"] == []
    assert not (tmp_path / "file").exists()
    assert "there is no cache at" in cache.err


@pytest.mark.parametrize("arguments", [(), ("abc", "--all")])
def test_export_needs_keys_or_all(cache: CacheCommand, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    cache("export", str(tmp_path / "file"), *arguments, code=2)
    assert "Name their keys (`piecegraph cache ls` lists them), or give --all, not both." in cache.err
