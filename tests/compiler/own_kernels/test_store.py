"""Kernels of a model in the cache: added kernels are loaded after authentication, and problems cost a compile."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path

import pytest

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.keys import key_of
from piecegraph.cache.store.store import Loaded, Store
from piecegraph.cache.trust.folder_trust import Access
from piecegraph.compiler.own_kernels import store as kernel_store
from piecegraph.compiler.own_kernels.store import KernelStore, graphs_key, kernel_factors, triton_files
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.triton.kernel_pack import KernelFiles
from tests.compiler.own_kernels.kernel_caches import GPU, OF, blobs_in, cache_in, gpu_machine, store_in

__all__ = ["gpu_machine"]
pytestmark = pytest.mark.usefixtures("gpu_machine")


def some(*fingerprints: str, name: str = "add") -> KernelFiles:
    return KernelFiles({each: {f"{name}.json": b"{}", f"{name}.cubin": each.encode()} for each in fingerprints})


LIBRARY = KernelFiles({}, {"launcher/x.so": b"so"})


def entry_in(tmp_path: Path) -> Entry:
    (row,) = cache_in(tmp_path).store.list()  # type: ignore[union-attr]  # there is one
    assert row.file.entry is not None
    return row.file.entry


def test_added_kernels_are_loaded(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert not store.load()
    assert store.save(some("a", "b") | LIBRARY, {"a", "b"}, 2.0) == ""
    assert store_in(tmp_path).load() == some("a", "b") | LIBRARY
    assert not store_in(tmp_path, "1" * 64).load()
    entry = entry_in(tmp_path)
    assert entry.seconds == {"compile": 2.0}
    assert entry.notes == {"kernels": 2, "functions": {"add": 2}}


def test_new_kernels_are_one_more_blob(tmp_path: Path) -> None:
    """In the process that made the entry, and in one that loaded it; without anything new nothing is written."""
    store = store_in(tmp_path)
    store.save(some("a"), {"a"}, 1.0)
    store.save(some("a", "b"), {"a", "b"}, 0.5)
    first = set(blobs_in(tmp_path))
    assert len(first) == 2
    assert store.save(some("a", "b"), {"a", "b"}, 0.0) == ""
    later = store_in(tmp_path)
    later.load()
    later.save(some("c", name="mul"), {"c"}, 0.25)
    assert first < set(blobs_in(tmp_path))
    entry = entry_in(tmp_path)
    assert list(entry.blobs) == ["triton/0", "triton/1", "triton/2"]
    assert entry.seconds == {"compile": 1.75}
    assert entry.notes == {"kernels": 3, "functions": {"add": 2, "mul": 1}}
    assert store_in(tmp_path).load().kernels.keys() == {"a", "b", "c"}


def test_many_blobs_are_merged_into_one(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    names = [f"{number:02}" for number in range(kernel_store.MOST_BLOBS + 1)]
    for name in names:
        assert store.save(some(name), {name}, 0.0) == ""
    assert list(entry_in(tmp_path).blobs) == ["triton/0"]
    assert store_in(tmp_path).load() == some(*names)


def test_unused_kernels_are_dropped_past_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_store, "MOST_KERNELS", 3)
    store_in(tmp_path).save(some("a", "b", "c") | LIBRARY, {"a", "b", "c"}, 0.0)
    later = store_in(tmp_path)
    later.load()
    later.save(some("b", "d"), {"b", "d"}, 0.0)
    assert store_in(tmp_path).load() == some("b", "d") | LIBRARY


def test_a_rejected_kernel_is_replaced(tmp_path: Path) -> None:
    store_in(tmp_path).save(some("a", "b"), {"a", "b"}, 0.0)
    better = KernelFiles({"a": {"add.json": b"better"}})
    later = store_in(tmp_path)
    later.load()
    later.reject("a")
    later.save(better, {"a"}, 0.0)
    assert store_in(tmp_path).load() == some("b") | better


@pytest.mark.parametrize("damage", ["flipped", "gone", "short"])
def test_damage_is_quarantined_and_compiled_over(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store_in(tmp_path).save(some("a"), {"a"}, 0.0)
    (blob,) = blobs_in(tmp_path)
    data = blob.read_bytes()
    if damage == "gone":
        blob.unlink()
    else:
        blob.write_bytes(data[:-1] if damage == "short" else bytes([data[0] ^ 1]) + data[1:])
    later = store_in(tmp_path)
    assert not later.load()
    assert "compiling again" in caplog.text or damage == "gone"
    assert later.save(some("a"), {"a"}, 0.0) == ""
    assert store_in(tmp_path).load() == some("a")


def test_an_unauthenticated_entry_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of another user with right digests is refused before its bytes are unpacked."""
    theirs = CompileCache(Store.open(tmp_path / "cache", key_file=tmp_path / "their key"), True)
    assert KernelStore(theirs, OF, GPU).save(some("a") | LIBRARY, {"a"}, 0.0) == ""
    store_in(tmp_path, "1" * 64).save(some("own"), {"own"}, 0.0)  # we have a key of our own
    monkeypatch.setattr(kernel_store, "unpack", lambda data: pytest.fail("it was looked at"))
    assert not store_in(tmp_path).load()


def test_bytes_that_are_not_kernels_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are refused although our key signed them."""
    cache = cache_in(tmp_path)
    blobs = {"triton/0": b"no archive"}
    cache.save(Entry.of(kernel_factors(OF, GPU), blobs, created=time.time()), blobs)
    store = store_in(tmp_path)
    assert not store.load()
    assert "reading its kernels" in caplog.text
    assert store.save(some("a"), {"a"}, 0.0) == ""
    assert store_in(tmp_path).load() == some("a")


def test_a_full_disk_and_a_missing_cache_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_in(tmp_path).save(some("a"), {"a"}, 0.0)
    store = store_in(tmp_path)
    store.load()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("piecegraph.cache.store.store.put_blob", full)
    assert "No space left" in store.save(some("b"), {"b"}, 0.0)
    off = KernelStore(CompileCache(None, False, "PIECEGRAPH_CACHE=off"), OF, GPU)
    assert not off.load()
    assert off.save(some("b"), {"b"}, 0.0) == "PIECEGRAPH_CACHE=off"


def test_another_users_cache_is_only_read(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    assert cache.store is not None
    assert not KernelStore(cache, OF, GPU).is_only_read
    cache.store.access = Access.READ_ONLY
    theirs = KernelStore(cache, OF, GPU)
    assert theirs.is_only_read
    assert "is only read" in theirs.save(some("a"), {"a"}, 0.0)


def test_each_factor_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(kernel_factors(of, GPU)) for of in (OF, "1" * 64)]
    monkeypatch.setattr(kernel_store, "triton_files", lambda: "another build")
    keys.append(key_of(kernel_factors(OF, GPU)))
    monkeypatch.setattr(kernel_store, "machine_factors", lambda device: {"device": "cuda", "gpu": "another"})
    keys.append(key_of(kernel_factors(OF, GPU)))
    assert len(set(keys)) == len(keys)


def test_the_build_of_triton_is_keyed_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of the installation and compiled Python files do not count."""

    class Distribution:
        def __init__(self, record: str) -> None:
            self._record = record

        def read_text(self, name: str) -> str:
            return self._record

    def digest(*lines: str) -> str | None:
        found = Distribution("\n".join(lines))
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
        triton_files.cache_clear()
        return triton_files()

    library, script = "triton/_C/libtriton.so,sha256=one,9", "../../bin/proton,sha256=here,9"
    try:
        first = digest(library, script)
        assert first == digest("../../bin/proton,sha256=there,9", library, "triton/__pycache__/x.pyc,sha256=x,9")
        assert first != digest("triton/_C/libtriton.so,sha256=two,9", script)
        assert digest("") is None
    finally:
        triton_files.cache_clear()


def test_the_graphs_key_ignores_order_and_repetition() -> None:
    assert graphs_key(["a", "b", "a"]) == graphs_key(["b", "a"]) != graphs_key(["a"])


def test_loading_dozens_of_kernels_reads_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are the entry and one blob."""
    names = [f"{number:02}" for number in range(60)]
    store_in(tmp_path).save(some(*names), set(names), 0.0)
    read = []
    real = CompileCache.load

    def counted(self: CompileCache, key: str) -> Loaded | None:
        found = real(self, key)
        read.append(len(found.blobs) if found is not None else 0)
        return found

    monkeypatch.setattr(CompileCache, "load", counted)
    assert len(store_in(tmp_path).load().kernels) == 60
    assert read == [1]
