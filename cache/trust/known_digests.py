"""The known digests of large files, kept by size, times and inode, and signed.

Whoever may write to a file can set its modification time back, but no user can set its change time. So an inode with
the recorded size and times holds the bytes that were hashed, unless the disk has changed them by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.disk.files import make_folders_above, read_regular, write_atomically
from piecegraph.cache.disk.layout import default_key_file, is_digest
from piecegraph.cache.trust.keyring import Keyring, Signer, Verdict

MAX_BYTES = 1 << 20
MAX_FILES = 256
"""The most files whose digests are kept; what this process has hashed stays."""


def default_digests_file() -> Path:
    """Return the file of digests, beside the user's own key, since digests are for this user's machine only."""
    return default_key_file().with_name("digests.json")


class KnownDigests:
    """The sha256 of files by their inodes. Methods raise nothing for a bad file of digests."""

    def __init__(self, path: Path, keyring: Keyring) -> None:
        """Read the digests in `path`, which need not exist. They are used only if a key of `keyring` signed them."""
        self._path = path
        self._known = _read(path, keyring)
        self.is_changed = False  # something was hashed that is not kept yet

    def digest(self, file: Path) -> str:
        """Return the sha256 of `file` in hexadecimal, read only where it is not known. Raises OSError."""
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            name, before = f"{status.st_dev}:{status.st_ino}", _numbers(status)
            kept = self._known.get(name)
            if kept is not None and kept["numbers"] == before:
                return str(kept["digest"])
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            if _numbers(os.fstat(stream.fileno())) == before:  # else it was written to meanwhile
                self._known.pop(name, None)  # so that it is among the newest
                self._known[name] = {"digest": found, "numbers": before}
                self.is_changed = True
        return found

    def keep(self, signer: Signer) -> None:
        """Write what was hashed for the next process, if anything was.

        Raises nothing: without the file, the next process hashes again.
        """
        if not self.is_changed:
            return
        newest = dict(list(self._known.items())[-MAX_FILES:])
        document = {"digests": newest, "signature": signer.sign("digests", canonical_json(newest))}
        with contextlib.suppress(OSError):
            make_folders_above(self._path)
            write_atomically(self._path, canonical_json(document), self._path.parent)
            self.is_changed = False


def _numbers(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read(path: Path, keyring: Keyring) -> dict[str, dict[str, Any]]:
    try:
        document = parse_canonical(read_regular(path, MAX_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or not isinstance(digests := document.get("digests"), dict):
        return {}
    if keyring.verify("digests", canonical_json(digests), document.get("signature")) is not Verdict.GOOD:
        return {}
    return {name: each for name, each in digests.items() if _is_record(each)}


def _is_record(each: Any) -> bool:
    return isinstance(each, Mapping) and is_digest(each.get("digest")) and isinstance(each.get("numbers"), list)
