"""The store of the cache: it loads entries that are trusted and saves new ones. Its errors never prevent a compile."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from piecegraph.cache.disk.counters import Counters
from piecegraph.cache.disk.files import (
    make_folders_above,
    scan_folder,
    sync_folder,
    sync_if_ours,
    write_atomically,
)
from piecegraph.cache.disk.layout import Layout, default_key_file, is_digest
from piecegraph.cache.store.blobs import BlobError, get_blob, put_blob
from piecegraph.cache.store.entry import BadEntry, BlobRef, Entry, check_key
from piecegraph.cache.store.entry_file import IS_BAD_FILE, EntryFile, MissReason, read_entry_file, write_document
from piecegraph.cache.store.stamps import last_used, stamp
from piecegraph.cache.trust.folder_trust import Access, check_folder
from piecegraph.cache.trust.key_files import load_or_create_own_key, read_own_key
from piecegraph.cache.trust.key_pair import PrivateKey
from piecegraph.cache.trust.keyring import Keyring, Signer
from piecegraph.cache.trust.quarantine import quarantine, remove
from piecegraph.cache.trust.signed_list import add_to_signed_list, read_signed_list
from piecegraph.cache.trust.trusted_keys import read_trusted_keys
from piecegraph.errors import CacheError, UntrustedCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An entry whose signature was verified, and its blobs, whose digests were.

    The blobs are in memory. To dlopen one, write it to a private folder: the file in the cache may change after the
    check.
    """

    entry: Entry
    blobs: Mapping[str, bytes]  # by role


@dataclass(frozen=True, slots=True)
class Miss:
    """The result of a load that found nothing usable."""

    reason: MissReason
    detail: str = ""
    bad: Path | None = None  # a file that will never be good again, which `load` moves to the quarantine


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save that worked."""

    key: str
    new_blobs: int  # the number of blobs that were not in the cache before


@dataclass(frozen=True, slots=True)
class NotSaved:
    """The result of a save that failed. A store logs a warning only for its first failure."""

    reason: str


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry in a listing. Its signature was checked; its blobs were not read."""

    file: EntryFile
    last_used: float  # seconds since 1970

    @property
    def key(self) -> str:
        return self.file.key

    @property
    def state(self) -> str:
        """The problem that keeps the entry from being loaded, or else the state that is written in the entry."""
        if self.file.problem is not None:
            return self.file.problem.value
        assert self.file.entry is not None, "a file without a problem has an entry"
        return self.file.entry.state

    @property
    def size(self) -> int:
        """The size in bytes, including blobs that other entries share."""
        return self.file.size + (self.file.entry.blob_bytes if self.file.entry is not None else 0)


class Store:
    """The entries and blobs in one cache folder. Processes and threads may use it at once; reads take no lock."""

    def __init__(self, layout: Layout, access: Access, key_file: Path, keyring: Keyring, publish: bool) -> None:
        """Take parts that are checked already. Callers use `open` instead, which explains the arguments."""
        self.layout = layout
        self.access = access
        self._key_file = key_file
        self._keyring = keyring
        self._publish = publish
        self.counters = Counters(layout.counters, self._file_mode)
        self._warned = False
        self._has_saved = False  # whether this object has saved an entry, so that folders and key were checked
        self.clock: Callable[[], float] = time.time  # seconds since 1970

    @classmethod
    def open(
        cls, root: Path, *, key_file: Path | None = None, signing_key_file: Path | None = None, publish: bool = False
    ) -> Store:
        """Open the store at `root`, which need not exist, and create nothing.

        `key_file` holds the user's own key and is created at the first save; None means `layout.default_key_file()`.
        `signing_key_file` names further trusted keys, as `read_trusted_keys` takes them; public keys suffice to read
        the root of another user. With `publish`, entries are saved for other users: they are readable by all, and
        signed with the first key of `signing_key_file` that can sign. Only entries signed by these keys are trusted
        then, because readers do not hold the user's own key.

        Raises `CacheError` if the folder or a key cannot be used, with what to do about it (a compile then runs without
        the cache), and OSError.
        """
        assert not publish or signing_key_file is not None, "publish signs with the key in signing_key_file"
        trusted = read_trusted_keys(signing_key_file)
        if publish and Keyring(trusted=trusted).signer is None:
            raise CacheError(
                f"{signing_key_file} is a public key: it verifies, and cannot sign what others are to read. Name the "
                "private key that belongs to it; `piecegraph cache keygen FILE` makes a pair."
            )
        layout = Layout(root)
        access = _check_folders(layout, has_signing_key=bool(trusted))
        key_file = default_key_file() if key_file is None else key_file
        own = None
        if not publish and access is Access.READ_WRITE:  # the user's own key has signed nothing in another user's root
            with contextlib.suppress(FileNotFoundError):
                own = read_own_key(key_file)
        return cls(layout, access, key_file, Keyring(own, trusted), publish)

    def load(self, key: str) -> Loaded | Miss:
        """Load what was saved under `key`, with every byte checked, and count the hit or miss.

        A hit is stamped with the time of its use; a bad file goes to the quarantine. Another user's root is only read.
        Never raises for what is on the disk.
        """
        found = self.verify(key)
        if self.access is Access.READ_ONLY:
            return found
        if isinstance(found, Loaded):
            stamp(self.layout, key, self.clock(), self._file_mode)
            self.counters.hit(key, sum(found.entry.seconds.values()))
            return found
        if found.bad is not None:
            kind = "blob" if found.reason is MissReason.BLOB_CORRUPT else "entry"
            if quarantine(self.layout, found.bad, kind):
                self.counters.quarantined(key, kind)
            logger.warning(
                "cache entry %s is not used (%s: %s); compiling again", key, found.reason.value, found.detail
            )
        self.counters.miss(key, found.reason.value)
        return found

    def verify(self, key: str) -> Loaded | Miss:
        """Check an entry as `load` does, but change nothing: no stamp, no count, no quarantine."""
        file = self._read(key)
        if file.problem is not None:
            bad = self.layout.entry(key) if file.problem in IS_BAD_FILE else None
            return Miss(file.problem, file.detail, bad)
        assert file.entry is not None, "a file without a problem has an entry"
        try:
            check_key(file.entry)
        except BadEntry as error:
            return Miss(MissReason.CORRUPT, str(error), self.layout.entry(key))
        found: dict[BlobRef, bytes] = {}  # a blob with several roles is read and held once
        for role, ref in file.entry.blobs.items():
            if ref in found:
                continue
            try:
                data = get_blob(self.layout, ref)
            except OSError as error:
                return Miss(MissReason.UNREADABLE, f"{role}: {error}")
            if data is BlobError.MISSING:
                return Miss(MissReason.BLOB_MISSING, f"{role} ({ref.digest})")
            if isinstance(data, BlobError):
                return Miss(MissReason.BLOB_CORRUPT, f"{role} ({ref.digest})", self.layout.blob(ref.digest))
            found[ref] = data
        return Loaded(file.entry, {role: found[ref] for role, ref in file.entry.blobs.items()})

    def signature(self, key: str) -> Mapping[str, Any]:
        """Return the signature in the file of an entry, whether valid or not; empty if there is none."""
        return self._read(key).signature

    def exists(self, key: str) -> bool:
        """Return whether there is an entry with a trusted signature under `key`. Its blobs are not read."""
        return self._read(key).problem is None

    def save(self, entry: Entry, blobs: Mapping[str, bytes]) -> Saved | NotSaved:
        """Save an entry and its blobs, given by role, under `entry.key`. An earlier entry of that key is replaced.

        Blobs are on the disk before the entry that names them, so an interrupted save leaves no broken entry. Errors of
        the disk, and folders that others can write to, give `NotSaved` and no exception.
        """
        assert {role: BlobRef.of(data) for role, data in blobs.items()} == dict(entry.blobs), "blobs of another entry"
        if self.access is Access.READ_ONLY:
            return self._not_saved(f"{self.layout.root} belongs to another user and is only read")
        try:
            self._make_folders()
            key = self._signer()
            distinct = {ref: blobs[role] for role, ref in entry.blobs.items()}
            new = sum(put_blob(self.layout, data, self._file_mode) for data in distinct.values())
            sync_folder(self.layout.blobs)
            path = self.layout.entry(entry.key)
            if path.is_dir() and not path.is_symlink():  # a rename cannot replace a folder
                quarantine(self.layout, path, "entry")
            document = write_document(entry, key)
            write_atomically(path, document, self.layout.temp, self._file_mode)
            sync_folder(self.layout.entries)
        except (OSError, UntrustedCache) as error:
            return self._not_saved(str(error))
        self._has_saved = True
        if isinstance(key, PrivateKey):
            with contextlib.suppress(OSError):  # without the signed list, listings are only slower
                add_to_signed_list(self.layout, key, entry.key, document, self._file_mode)
        stamp(self.layout, entry.key, self.clock(), self._file_mode)
        self.counters.saved(entry.key)
        return Saved(entry.key, new)

    def prepare(self) -> bool:
        """Make the folders, so that lock files can be made in them. Return False if that fails."""
        if self.access is Access.READ_ONLY:
            return False
        try:
            self._make_folders()
        except (OSError, UntrustedCache):
            return False  # `save` will report the reason
        return True

    def delete(self, key: str) -> bool:
        """Remove an entry; return False if there is none. `collect` removes its blobs later. Raises OSError."""
        removed = remove(self.layout, self.layout.entry(key), "entry")
        remove(self.layout, self.layout.stamp(key), "stamp")
        return removed

    def list(self) -> tuple[Listed, ...]:
        """Return every entry, most recently used first. Raises PermissionError if the folder cannot be read."""
        names = [item.name for item in scan_folder(self.layout.entries)]
        keys = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        signed = read_signed_list(self.layout, self.keyring)
        files = [read_entry_file(self.layout, key, self.keyring, signed) for key in keys if is_digest(key)]
        now = self.clock()
        rows = [Listed(file, last_used(self.layout, file, now)) for file in files]
        rows = [row for row in rows if row.file.problem is not MissReason.ABSENT]  # removed since the scan
        return tuple(sorted(rows, key=lambda row: (-row.last_used, row.key)))

    @property
    def signer(self) -> Signer:
        """The key that `save` signs with, created if there is none. Raises `UntrustedCache`, OSError."""
        return self._signer()

    @property
    def export_signer(self) -> Signer:
        """The key that exports are signed with: the first configured key that can sign, else `signer`."""
        return self._keyring.signer or self.signer

    @property
    def keyring(self) -> Keyring:
        """The trusted keys. The file of the user's own key is read again until it exists: any process may create it."""
        if self._keyring.own is None and not self._publish:
            with contextlib.suppress(OSError, UntrustedCache):
                self._keyring = replace(self._keyring, own=read_own_key(self._key_file))
        return self._keyring

    @property
    def _file_mode(self) -> int:
        return 0o644 if self._publish else 0o600

    def _read(self, key: str) -> EntryFile:
        return read_entry_file(self.layout, key, self.keyring)

    def _signer(self) -> Signer:
        """Return `signer`. Until the first save, the file of the user's own key is read again."""
        if self._publish:
            assert self._keyring.signer is not None, "`open` refuses to publish without a key that can sign"
            return self._keyring.signer
        if self._keyring.own is None or not self._has_saved:
            self._keyring = replace(self._keyring, own=load_or_create_own_key(self._key_file))
        assert self._keyring.own is not None, "loaded or created above"
        return self._keyring.own

    def _make_folders(self) -> None:
        """Make all folders and check them. Raises OSError, `UntrustedCache`."""
        if not self._has_saved or not self.layout.root.exists():
            make_folders_above(self.layout.root, 0o755)
        made = []
        for folder in self.layout.folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
                made.append(folder)
        _check_folders(self.layout, has_signing_key=False)
        # At the first save this is done for all folders: the process that made them may have been killed before it.
        for folder in made if self._has_saved else self.layout.folders:
            if self._publish:
                os.chmod(folder, 0o755)  # whatever the umask says
            sync_if_ours(folder.parent)

    def _not_saved(self, reason: str) -> NotSaved:
        """Return a `NotSaved`, with a warning the first time."""
        if not self._warned:
            self._warned = True
            logger.warning("what was compiled is not cached, now and later: %s", reason)
        return NotSaved(reason)


def _check_folders(layout: Layout, *, has_signing_key: bool) -> Access:
    """Return READ_ONLY if any folder of the cache belongs to another user. Raises `UntrustedCache`, OSError."""
    access = Access.READ_WRITE
    for folder in layout.folders:
        with contextlib.suppress(FileNotFoundError):
            is_root = folder == layout.root
            if check_folder(folder, has_signing_key=has_signing_key, is_root=is_root) is Access.READ_ONLY:
                access = Access.READ_ONLY
    return access
