"""Poison: what an attacker puts into a cache, with right digests, is never unpickled or dlopened. Of all of `cache/`.

The poison works: signed by us it leaves its mark. Signed by anybody else, or by nobody, it leaves none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.store.entry import BlobRef, Entry
from piecegraph.cache.store.store import Loaded, Miss, Store
from piecegraph.cache.trust.key_files import create_key_pair
from piecegraph.cache.trust.keyring import Signer
from piecegraph.cache.trust.shared_key import SharedKey
from piecegraph.cache.upkeep.archive import export_archive, import_archive
from piecegraph.cache.upkeep.collect import collect
from piecegraph.errors import ArchiveRefused
from tests.cache.cache_roots import NOW, a_store, an_entry, saved

THEIRS = SharedKey(b"t" * 32)


class LeavesAMark:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    """A library that makes a folder when it is loaded, and which folder."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("library")
    mark = folder / "mark"
    (folder / "poison.c").write_text(
        "#include <sys/stat.h>\n"
        f'__attribute__((constructor)) static void leave_a_mark(void) {{ mkdir("{mark}", 0700); }}\n'
    )
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "poison.so"), str(folder / "poison.c")]
    subprocess.run(command, check=True)
    return (folder / "poison.so").read_bytes(), mark


@pytest.fixture
def poison(tmp_path: Path, library: tuple[bytes, Path]) -> dict[str, bytes]:
    with contextlib.suppress(FileNotFoundError):
        library[1].rmdir()  # of the test before
    return {"artifact": pickle.dumps(LeavesAMark(tmp_path / "mark")), "library": library[0]}


def marks(tmp_path: Path, library: tuple[bytes, Path]) -> int:
    return (tmp_path / "mark").exists() + library[1].exists()


def use(store: Store, key: str, folder: Path) -> bool:
    """Use an entry as a compiler does: run what it loads."""
    found = store.load(key)
    if isinstance(found, Miss):
        return False
    pickle.loads(found.blobs["artifact"])
    (folder / "loaded.so").write_bytes(found.blobs["library"])
    ctypes.CDLL(str(folder / "loaded.so"))
    return True


def test_the_poison_works(tmp_path: Path, poison: dict[str, bytes], library: tuple[bytes, Path]) -> None:
    """Otherwise the tests below would show nothing."""
    store = a_store(tmp_path)
    assert use(store, saved(store, poison).key, tmp_path)
    assert marks(tmp_path, library) == 2


FORGERIES: dict[str, Callable[[Signer, bytes], Any]] = {
    "unsigned": lambda ours, data: None,
    "signed by another key": lambda ours, data: THEIRS.sign("entry", data),
    "under our key's name": lambda ours, data: THEIRS.sign("entry", data) | {"key_id": ours.key_id},
    "with our signature of something else": lambda ours, data: ours.sign("entry", data + b" "),
    "with our signature of an archive": lambda ours, data: ours.sign("archive", data),
    "by a scheme of the forger's": lambda ours, data: {"scheme": "none", "key_id": ours.key_id, "value": ""},
    "a digest as a signature": lambda ours, data: ours.sign("entry", data) | {"value": BlobRef.of(data).digest},
    "odd text": lambda ours, data: ours.sign("entry", data) | {"value": "é\ud800"},
    "a list": lambda ours, data: [ours.sign("entry", data)],
}


def plant(store: Store, blobs: dict[str, bytes], signature: Callable[[Signer, bytes], Any]) -> Entry:
    """Plant what somebody with write access can: blobs under their digests, and an entry that names them."""
    entry = saved(store, blobs)
    document = parse_canonical(store.layout.entry(entry.key).read_bytes())["entry"]
    forged = {"entry": document, "signature": signature(store.signer, canonical_json(document))}
    store.layout.entry(entry.key).write_bytes(canonical_json(forged))
    return entry


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_entry_that_we_have_not_signed_runs_nothing(
    tmp_path: Path, poison: dict[str, bytes], library: tuple[bytes, Path], forgery: str
) -> None:
    """Nothing else that reads the cache runs it: listing, verifying, collecting, exporting."""
    store = a_store(tmp_path)
    entry = plant(store, poison, FORGERIES[forgery])
    for digest in (ref.digest for ref in entry.blobs.values()):
        assert BlobRef.of(store.layout.blob(digest).read_bytes()).digest == digest, "the digests are right"
    assert not store.exists(entry.key)
    assert isinstance(store.verify(entry.key), Miss)
    assert [row.state for row in store.list()] in (["untrusted"], ["forged"])
    collect(store.layout, now=NOW, dry_run=True)
    assert not use(store, entry.key, tmp_path)
    assert marks(tmp_path, library) == 0


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_entry_in_an_image_that_its_private_key_has_not_signed_runs_nothing(
    tmp_path: Path, poison: dict[str, bytes], library: tuple[bytes, Path], forgery: str
) -> None:
    """A reader who has the public key is safe too; forgeries are of what the private key has signed."""
    public = create_key_pair(tmp_path / "image.key")
    entry = plant(a_store(tmp_path, signing_key_file=tmp_path / "image.key", publish=True), poison, FORGERIES[forgery])
    reader = a_store(tmp_path, signing_key_file=public)
    assert [row.state for row in reader.list()] in (["untrusted"], ["forged"])
    assert not use(reader, entry.key, tmp_path)
    assert marks(tmp_path, library) == 0


def test_a_genuine_entry_whose_blob_was_exchanged_runs_nothing(
    tmp_path: Path, poison: dict[str, bytes], library: tuple[bytes, Path]
) -> None:
    """Poison under the name of a good blob; and an entry with the poison's digest and the good one's signature."""
    store = a_store(tmp_path)
    good = saved(store, {"artifact": pickle.dumps(1), "library": b"good"})
    good_bytes = store.layout.entry(good.key).read_bytes()
    for role, data in poison.items():
        store.layout.blob(good.blobs[role].digest).write_bytes(data)
    assert not use(store, good.key, tmp_path)

    bad = saved(store, poison)
    text = good_bytes.decode()
    for role, ref in good.blobs.items():
        text = text.replace(ref.digest, bad.blobs[role].digest)
        text = text.replace(f'"size":{ref.size}', f'"size":{bad.blobs[role].size}')
    store.layout.entry(good.key).write_bytes(text.encode())
    assert not use(store, good.key, tmp_path)
    assert marks(tmp_path, library) == 0


def test_a_poisoned_archive_brings_nothing_unless_it_is_trusted(
    tmp_path: Path, poison: dict[str, bytes], library: tuple[bytes, Path]
) -> None:
    theirs = Store.open(tmp_path / "theirs", key_file=tmp_path / "theirs.key")
    entry = an_entry(poison)
    theirs.save(entry, poison)
    export_archive(theirs, tmp_path / "file", [entry.key])
    store = a_store(tmp_path)
    with pytest.raises(ArchiveRefused, match="--trust"):
        import_archive(store, tmp_path / "file")
    assert not use(store, entry.key, tmp_path)
    import_archive(store, tmp_path / "file", trust=True)
    assert marks(tmp_path, library) == 0, "an import runs nothing either"
    assert isinstance(store.verify(entry.key), Loaded)
