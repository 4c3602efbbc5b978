"""Signed folders: a signed list in a folder names the files that belong there, with their digests.

The files, such as a model's weights and its tokenizer, are read by other programs. The folder is trusted like an entry
of the cache: nobody else may write to it or to its files, a trusted key has signed the list, the folder has only files
that the list names, and every file has the listed digest.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.disk.files import read_regular, scan_folder, sync_folder, write_atomically
from piecegraph.cache.store.entry import BadEntry, BlobRef, blob_ref
from piecegraph.cache.trust.folder_trust import OTHERS_WRITE, check_folder
from piecegraph.cache.trust.keyring import Keyring, Signer, Verdict
from piecegraph.cache.trust.known_digests import KnownDigests
from piecegraph.errors import UntrustedCache

LIST = "piecegraph-files.json"
"""The name of the signed list, which names all files but itself."""

FORMAT = 1
_MAX_LIST_BYTES = 1 << 20


class SignedFolderError(Exception):
    """The error that a folder is not what a trusted key has signed; the message gives the reason."""


def sign_folder(folder: Path, made_from: str, signers: Sequence[Signer], digests: KnownDigests) -> None:
    """Write the list of the files in `folder`, with a signature of each signer and the mode of the other files.

    `made_from` names what the files were made from, and is signed too. Raises OSError.
    """
    files = {}
    mode = 0o600
    for item in scan_folder(folder):
        if item.name == LIST:
            continue
        status = item.stat(follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode)
        files[item.name] = {"digest": digests.digest(Path(item.path)), "size": status.st_size}
    listed = {"files": files, "format": FORMAT, "made_from": made_from}
    data = canonical_json(listed)
    document = {"files": listed, "signatures": [signer.sign("folder", data) for signer in signers]}
    write_atomically(folder / LIST, canonical_json(document), folder, mode)
    sync_folder(folder)


def check_signed_folder(folder: Path, made_from: str, keyring: Keyring, digests: KnownDigests) -> None:
    """Raise `SignedFolderError` unless `folder` holds what was signed as made from `made_from`, and nothing else.

    Raises FileNotFoundError where there is no folder, OSError.
    """
    try:
        check_folder(folder, has_signing_key=bool(keyring.trusted))
    except UntrustedCache as error:
        raise SignedFolderError(str(error).partition(" Run: ")[0]) from None
    files = _signed_files(folder, made_from, keyring)
    there = {item.name for item in scan_folder(folder)} - {LIST}
    if there != set(files):
        odd = sorted(there ^ set(files))[0]
        raise SignedFolderError(f"{odd} is {'not in the list' if odd in there else 'missing'}")
    owner = os.lstat(folder).st_uid
    for name, ref in files.items():
        _check_file(folder / name, ref, owner, digests)


def _signed_files(folder: Path, made_from: str, keyring: Keyring) -> dict[str, BlobRef]:
    """Return the files that the list names, after its signature was found good. Raises `SignedFolderError`, OSError."""
    try:
        document = parse_canonical(read_regular(folder / LIST, _MAX_LIST_BYTES))
    except FileNotFoundError:
        raise SignedFolderError("no key has signed it") from None
    except (OSError, ValueError) as error:
        raise SignedFolderError(f"its list of files cannot be read: {error}") from None
    if not isinstance(document, dict) or set(document) != {"files", "signatures"}:
        raise SignedFolderError("its list of files is none of ours")
    listed, signatures = document["files"], document["signatures"]
    data = canonical_json(listed)
    verdicts = [keyring.verify("folder", data, each) for each in signatures] if isinstance(signatures, list) else []
    if Verdict.GOOD not in verdicts:
        forged = Verdict.FORGED in verdicts
        raise SignedFolderError("its signature does not fit" if forged else "it is not signed with a key that you hold")
    return _files(listed, made_from)


def _files(listed: Any, made_from: str) -> dict[str, BlobRef]:
    if not isinstance(listed, dict) or listed.get("format") != FORMAT or not isinstance(listed.get("files"), dict):
        raise SignedFolderError("it was signed by another version")
    if listed.get("made_from") != made_from:
        raise SignedFolderError("it was made from something else")
    try:
        return {name: blob_ref(name, ref) for name, ref in listed["files"].items()}
    except BadEntry as error:
        raise SignedFolderError(str(error)) from None


def _check_file(file: Path, ref: BlobRef, owner: int, digests: KnownDigests) -> None:
    """Raise `SignedFolderError` for a file that others may write to, or that holds other bytes."""
    try:
        status = os.lstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise SignedFolderError(f"{file.name} is not a regular file")
        if status.st_mode & OTHERS_WRITE or status.st_uid != owner:
            raise SignedFolderError(f"others can write to {file.name}")
        if status.st_size != ref.size or digests.digest(file) != ref.digest:
            raise SignedFolderError(f"{file.name} has other bytes")
    except OSError as error:
        raise SignedFolderError(f"{file.name} cannot be read: {error}") from None
