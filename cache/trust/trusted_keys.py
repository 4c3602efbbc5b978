"""The configured keys: a file, a folder of files, or several of either.

While a signer changes keys, readers hold the old one and the new one.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from piecegraph.cache.trust.folder_trust import OTHERS_WRITE, quoted
from piecegraph.cache.trust.key_files import read_signing_key
from piecegraph.cache.trust.keyring import Verifier
from piecegraph.errors import UntrustedCache


def read_trusted_keys(named: str | Path | None) -> tuple[Verifier, ...]:
    """Return every key of `named`, in order and each once; nothing for None.

    `named` is key files and folders of key files, joined by `os.pathsep`; `~` is the user's home. In a folder, every
    file counts whose name does not begin with a dot. A file that cannot be read as a key is an error and is not
    skipped, since nobody would notice. Raises `UntrustedCache` with what to do, `CacheError`, OSError.
    """
    if named is None:
        return ()
    text = str(named)
    if "\0" in text:
        raise UntrustedCache(f"signing key file {text!r} is not a path: it has a NUL in it. Name a key file.")
    parts = [text] if os.path.lexists(os.path.expanduser(text)) else [part for part in text.split(os.pathsep) if part]
    keys: dict[tuple[str, str], Verifier] = {}
    for part in parts or [text]:
        path = Path(part).expanduser()
        for file in _files(path) if path.is_dir() else [path]:
            key = read_signing_key(file)
            keys.setdefault((key.scheme, key.key_id), key)
    return tuple(keys.values())


def _files(folder: Path) -> list[Path]:
    """Return the key files in `folder`. Raises `UntrustedCache`, OSError."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UntrustedCache(
            f"folder {folder} of signing keys belongs to user {status.st_uid}, who can put other keys there; it must "
            f"be yours or root's. Run: cp -r {quoted(folder)} {quoted(folder)}.mine && mv -T {quoted(folder)} "
            f"{quoted(folder)}.old && mv -T {quoted(folder)}.mine {quoted(folder)}"
        )
    if status.st_mode & OTHERS_WRITE:
        is_shared = bool(status.st_mode & stat.S_ISVTX)  # /tmp, say, which is not to be changed
        what_to_do = "Name a folder of yours." if is_shared else f"Run: chmod go-w {quoted(folder)}"
        raise UntrustedCache(
            f"folder {folder} of signing keys has mode {stat.filemode(status.st_mode)}: others can put keys there. "
            f"{what_to_do}"
        )
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if not files:
        raise UntrustedCache(f"folder {folder} of signing keys holds no key file.")
    return files
