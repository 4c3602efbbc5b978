"""Archives: entries in one file, to be carried to another machine; a signed manifest, then the blobs end to end.

The format has no file names, no links and no compression, so nothing can escape a folder or expand without bounds. It
is a line that names the format, eight bytes of length, the manifest with its signature in canonical JSON, then each
blob of the manifest, in its order and of its size.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.disk.files import sync_folder, write_all
from piecegraph.cache.store.blobs import get_blob
from piecegraph.cache.store.entry import (
    FORMAT,
    MAX_SIGNATURES,
    BadEntry,
    BlobRef,
    Entry,
    blob_ref,
    check_key,
    from_document,
    to_document,
)
from piecegraph.cache.store.store import Miss, NotSaved, Store
from piecegraph.cache.trust.keyring import Verdict
from piecegraph.errors import ArchiveRefused, CacheError

MAGIC = b"piecegraph cache archive 1\n"
_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 256 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import."""

    keys: tuple[str, ...]
    signed: bool  # by a key we hold; else the caller took it on trust


def export_archive(store: Store, file: Path, keys: Sequence[str]) -> int:
    """Write the entries of `keys` to `file`, signed, replacing what it held; return the number of bytes.

    The signer is the configured signing key if it can sign, else the user's own. Raises `CacheError` for a key that
    cannot be loaded and if `file` exists and is not a regular file (nothing is written then), OSError.
    """
    _refuse_to_replace(file)
    entries = [_with_origin(store, _good_entry(store, key)) for key in dict.fromkeys(keys)]
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
    """Save every entry of the archive, signed again with our key. All of it is checked before anything is written.

    With `trust`, an archive that none of our keys has signed is accepted; whoever made it can run code as this user. An
    archive that claims one of our keys and is not signed by it is refused all the same. Raises `ArchiveRefused`,
    `CacheError` if the store does not accept it, OSError.
    """
    with _open_file(file) as fd:
        header, start = _read_header(fd, file)
        entries, refs, signed = _manifest(store, header, file, trust)
        offsets = _offsets(fd, file, start, refs)
        for entry in entries:
            _check_origin(store, entry, file)
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


def _refuse_to_replace(file: Path) -> None:
    """Raise `CacheError` for a link, a pipe or a device, which replacing would remove."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(file).st_mode):
            raise CacheError(
                f"{file} is there and is not a regular file, so it is not replaced. Name a file that is not there, or "
                "remove it first."
            )


def _good_entry(store: Store, key: str) -> Entry:
    found = store.verify(key)
    if isinstance(found, Miss):
        detail = f" ({found.detail})" if found.detail else ""
        raise CacheError(f"entry {key} cannot be exported: it is {found.reason.value}{detail}.")
    return found.entry


def _with_origin(store: Store, entry: Entry) -> Entry:
    """Return `entry` with the signatures of its maker and its exporter, each over the entry without signatures."""
    bare = canonical_json(to_document(replace(entry, origin=())))
    signature = store.signature(entry.key)
    if not signature:  # its file was readable a moment ago
        raise CacheError(f"entry {entry.key} cannot be exported: its signature cannot be read any more.")
    made_by = (signature, *entry.origin)
    valid = [each for each in made_by if store.keyring.verify("entry", bare, each) is not Verdict.FORGED]
    kept: dict[tuple[str, str], Mapping[str, str]] = {}
    for each in (*valid[: MAX_SIGNATURES - 1], store.export_signer.sign("entry", bare)):
        kept.setdefault((each["scheme"], each["key_id"]), each)
    return replace(entry, origin=tuple(kept.values()))


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
    """Open `file`, which may be a link because the user chose it. Raises `ArchiveRefused` if it is not a file."""
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
    """Return `size` bytes at `offset`, fewer where the file ends. Raises OSError."""
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
    """Return the manifest with its signature, and where blobs begin."""
    lead = _read_at(fd, 0, len(MAGIC) + _LENGTH_BYTES)
    if not lead.startswith(MAGIC) or len(lead) != len(MAGIC) + _LENGTH_BYTES:
        raise ArchiveRefused(f"{file} is not an archive of this version of piecegraph (`piecegraph cache export`).")
    length = int.from_bytes(lead[len(MAGIC) :], "big")
    if length > min(MAX_HEADER_BYTES, os.fstat(fd).st_size - len(lead)):
        raise ArchiveRefused(f"{file} is damaged: its manifest would be {length} bytes, more than there is.")
    try:
        header = parse_canonical(_read_at(fd, len(lead), length))
    except ValueError as error:
        raise ArchiveRefused(f"{file} is damaged: its manifest is not canonical JSON ({error}).") from None
    return header, len(lead) + length


def _manifest(store: Store, header: Any, file: Path, trust: bool) -> tuple[list[Entry], list[BlobRef], bool]:
    """Return the entries, the blobs in the file's order, and whether one of our keys has signed them."""
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
        raise ArchiveRefused(f"{file} is not an archive of ours: {error}.") from None
    return entries, refs, verdict is Verdict.GOOD


def _check_origin(store: Store, entry: Entry, file: Path) -> None:
    """Raise `ArchiveRefused` for an entry that claims to be signed by a key of ours, and is not."""
    bare = canonical_json(to_document(replace(entry, origin=())))
    for signature in entry.origin:
        if store.keyring.verify("entry", bare, signature) is Verdict.FORGED:
            raise ArchiveRefused(
                f"{file} says of entry {entry.key} that key {signature['key_id']} of yours signed it, which it did "
                "not: damaged, or forged."
            )


def _checked(manifest: Any) -> tuple[list[Entry], list[BlobRef]]:
    """Return the entries and blobs of a manifest. Raises `BadEntry` for anything that an export never writes."""
    if not isinstance(manifest, dict) or set(manifest) != {"blobs", "entries", "format"}:
        raise BadEntry("its manifest has other fields")
    if manifest["format"] != FORMAT:
        raise BadEntry(f"it is of format {manifest['format']!r}; this version reads {FORMAT}")
    if not isinstance(manifest["entries"], list) or not isinstance(manifest["blobs"], list):
        raise BadEntry("entries or blobs are not lists")
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
    """Return where each blob begins. Raises `ArchiveRefused` unless the file ends where the last blob does."""
    offsets = {}
    end = start
    for ref in refs:
        offsets[ref.digest] = end
        end += ref.size
    size = os.fstat(fd).st_size
    if size != end:
        raise ArchiveRefused(f"{file} is damaged: it has {size} bytes, its manifest says {end}. Fetch it again.")
    return offsets
