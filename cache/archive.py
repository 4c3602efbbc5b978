"""Entries in one file, to be carried to another machine: a signed manifest, then the blobs end to end.

The form has no names of files in it, no links and no compression, so there is nothing to escape with and nothing to
blow up: a line that says what it is, eight bytes of length, the manifest with its signature in canonical JSON, then
each blob of the manifest, in its order, of the size it says.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecegraph.cache.blobs import get_blob
from piecegraph.cache.canonical import canonical_json, parse_canonical
from piecegraph.cache.entry import FORMAT, BadEntry, BlobRef, Entry, blob_ref, check_key, from_document, to_document
from piecegraph.cache.files import sync_folder, write_all
from piecegraph.cache.keyring import Verdict
from piecegraph.cache.store import Miss, NotSaved, Store
from piecegraph.errors import ArchiveRefused, CacheError

MAGIC = b"piecegraph cache archive 1\n"
_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 256 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Imported:
    """What an archive brought."""

    keys: tuple[str, ...]
    signed: bool  # by a key we hold; else the caller took it on trust


def export_archive(store: Store, file: Path, keys: Sequence[str]) -> int:
    """Write the entries of `keys` to `file`, in place of what it was, signed; bytes written.

    By the configured signing key where it can sign, by the user's own otherwise.
    Raises `CacheError` for a key that cannot be loaded (nothing is written then), OSError.
    """
    entries = [_good_entry(store, key) for key in dict.fromkeys(keys)]
    refs = {ref.digest: ref for entry in entries for ref in entry.blobs.values()}
    header = _header(store, entries, list(refs.values()))
    temp = file.parent / f".{file.name}.{secrets.token_hex(8)}.tmp"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(fd, header)
            for ref in refs.values():
                data = get_blob(store.layout, ref)
                if not isinstance(data, bytes):
                    raise CacheError(f"blob {ref.digest} became {data.value} during the export; nothing was written.")
                write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temp, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    sync_folder(file.parent)
    return len(header) + sum(ref.size for ref in refs.values())


def import_archive(store: Store, file: Path, *, trust: bool = False) -> Imported:
    """Save every entry of the archive, signed anew with our key. All of it is checked before anything is written.

    `trust`: take one that no key of ours has signed; whoever made it can run code as you. One that claims a key of
    ours and is not signed by it is refused all the same. Raises `ArchiveRefused`, `CacheError` where the store does
    not take it, OSError.
    """
    with _open_file(file) as fd:
        header, start = _read_header(fd, file)
        entries, refs, signed = _manifest(store, header, file, trust)
        offsets = _offsets(fd, file, start, refs)
        for ref in refs:
            if _digest_at(fd, offsets[ref.digest], ref.size) != ref.digest:
                raise ArchiveRefused(f"{file} is damaged: blob {ref.digest} has other bytes. Fetch it again.")
        for entry in entries:
            distinct = {ref: _read_at(fd, offsets[ref.digest], ref.size) for ref in set(entry.blobs.values())}
            if any(BlobRef.of(data) != ref for ref, data in distinct.items()):
                raise ArchiveRefused(f"{file} changed while it was read; entry {entry.key} was not taken.")
            saved = store.save(entry, {role: distinct[ref] for role, ref in entry.blobs.items()})
            if isinstance(saved, NotSaved):
                raise CacheError(f"entry {entry.key} of {file} was not saved: {saved.reason}")
    return Imported(tuple(entry.key for entry in entries), signed)


def _good_entry(store: Store, key: str) -> Entry:
    found = store.verify(key)
    if isinstance(found, Miss):
        detail = f" ({found.detail})" if found.detail else ""
        raise CacheError(f"entry {key} cannot be exported: it is {found.reason.value}{detail}.")
    return found.entry


def _header(store: Store, entries: Sequence[Entry], refs: Sequence[BlobRef]) -> bytes:
    manifest = {
        "blobs": [{"digest": ref.digest, "size": ref.size} for ref in refs],
        "entries": [to_document(entry) for entry in entries],
        "format": FORMAT,
    }
    signature = store.export_signer.sign("archive", canonical_json(manifest))
    body = canonical_json({"manifest": manifest, "signature": signature})
    return MAGIC + len(body).to_bytes(_LENGTH_BYTES, "big") + body


@contextmanager
def _open_file(file: Path) -> Iterator[int]:
    """`file`, where a link is as good: it is the user's own choice. Raises `ArchiveRefused` where it is no file."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ArchiveRefused(f"there is no file {file}.") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ArchiveRefused(f"{file} is not a regular file.")
        yield fd
    finally:
        os.close(fd)


def _read_at(fd: int, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`, fewer where the file ends. Raises OSError."""
    chunks = []
    while size > 0 and (chunk := os.pread(fd, min(size, _CHUNK), offset)):
        chunks.append(chunk)
        offset += len(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _digest_at(fd: int, offset: int, size: int) -> str:
    digest = hashlib.sha256()
    while size > 0:
        chunk = os.pread(fd, min(size, _CHUNK), offset)
        if not chunk:
            raise OSError(errno.EIO, "the file became shorter")
        digest.update(chunk)
        offset += len(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def _read_header(fd: int, file: Path) -> tuple[Any, int]:
    """The manifest with its signature, and where blobs begin."""
    lead = _read_at(fd, 0, len(MAGIC) + _LENGTH_BYTES)
    if not lead.startswith(MAGIC) or len(lead) != len(MAGIC) + _LENGTH_BYTES:
        raise ArchiveRefused(f"{file} is no archive of this version of piecegraph (`piecegraph cache export`).")
    length = int.from_bytes(lead[len(MAGIC) :], "big")
    if length > min(MAX_HEADER_BYTES, os.fstat(fd).st_size - len(lead)):
        raise ArchiveRefused(f"{file} is damaged: its manifest would be {length} bytes, more than there is.")
    try:
        header = parse_canonical(_read_at(fd, len(lead), length))
    except ValueError as error:
        raise ArchiveRefused(f"{file} is damaged: its manifest is no canonical JSON ({error}).") from None
    return header, len(lead) + length


def _manifest(store: Store, header: Any, file: Path, trust: bool) -> tuple[list[Entry], list[BlobRef], bool]:
    """Entries, blobs in the file's order, and whether a key of ours has signed them."""
    if not isinstance(header, dict) or set(header) != {"manifest", "signature"}:
        raise ArchiveRefused(f"{file} is damaged: its header is not a manifest and a signature.")
    manifest = header["manifest"]
    verdict = store.keyring.verify("archive", canonical_json(manifest), header["signature"])
    if verdict is Verdict.FORGED:
        raise ArchiveRefused(f"{file} says that it is signed by a key of yours, and is not: damaged, or forged.")
    if verdict is Verdict.UNKNOWN_KEY and not trust:
        raise ArchiveRefused(
            f"{file} is not signed by a key that you hold. Configure the public key of whoever made it, or, if you "
            "would run their code, import it with --trust."
        )
    try:
        entries, refs = _checked(manifest)
    except BadEntry as error:
        raise ArchiveRefused(f"{file} is no archive of ours: {error}.") from None
    return entries, refs, verdict is Verdict.GOOD


def _checked(manifest: Any) -> tuple[list[Entry], list[BlobRef]]:
    """Raises `BadEntry` for whatever an export never writes."""
    if not isinstance(manifest, dict) or set(manifest) != {"blobs", "entries", "format"}:
        raise BadEntry("its manifest has other fields")
    if manifest["format"] != FORMAT:
        raise BadEntry(f"it is of format {manifest['format']!r}; this version reads {FORMAT}")
    if not isinstance(manifest["entries"], list) or not isinstance(manifest["blobs"], list):
        raise BadEntry("entries or blobs are no list")
    entries = [from_document(document) for document in manifest["entries"]]
    if any(entry.format != FORMAT for entry in entries):
        raise BadEntry("an entry is of another version")
    for entry in entries:
        check_key(entry)
    refs = [_blob(each) for each in manifest["blobs"]]
    if len({entry.key for entry in entries}) != len(entries) or len({ref.digest for ref in refs}) != len(refs):
        raise BadEntry("something is in it twice")
    if {ref for entry in entries for ref in entry.blobs.values()} != set(refs):
        raise BadEntry("its blobs are not those of its entries")
    return entries, refs


def _blob(document: Any) -> BlobRef:
    if not isinstance(document, dict) or set(document) != {"digest", "size"}:
        raise BadEntry("a blob is not a digest and a size")
    return blob_ref("of the list", document)


def _offsets(fd: int, file: Path, start: int, refs: Sequence[BlobRef]) -> dict[str, int]:
    """Where each blob begins. Raises `ArchiveRefused` unless the file ends where the last one does."""
    offsets = {}
    end = start
    for ref in refs:
        offsets[ref.digest] = end
        end += ref.size
    size = os.fstat(fd).st_size
    if size != end:
        raise ArchiveRefused(f"{file} is damaged: it has {size} bytes, its manifest says {end}. Fetch it again.")
    return offsets
