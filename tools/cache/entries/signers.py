"""The signers of an entry: the key in its file, and those it was signed with before it was imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from piecegraph.cache.disk.canonical import canonical_json
from piecegraph.cache.store.entry import to_document
from piecegraph.cache.store.entry_file import EntryFile
from piecegraph.cache.trust.key_files import read_signing_key
from piecegraph.cache.trust.keyring import Keyring, Verdict
from piecegraph.errors import UsageError


@dataclass(frozen=True, slots=True)
class Signed:
    """One signature of an entry."""

    key_id: str
    scheme: str
    whose: str  # the key is one's "own", "configured", or "not held"
    is_good: bool | None  # None: nobody can tell, since the key is not held
    is_original: bool  # made before the entry was imported


def signers(file: EntryFile, keyring: Keyring) -> tuple[Signed, ...]:
    """Return the signatures of an entry, that of its file first."""
    key_id, scheme = file.signature.get("key_id"), file.signature.get("scheme")
    found = []
    if isinstance(key_id, str) and isinstance(scheme, str):
        whose = keyring.whose(file.signature)
        is_good = None if whose == "not held" else file.problem is None or file.problem.value == "other version"
        found.append(Signed(key_id, scheme, whose, is_good, False))
    if file.entry is not None and file.entry.origin:
        bare = canonical_json(to_document(replace(file.entry, origin=())))
        for each in file.entry.origin:
            verdict = keyring.verify("entry", bare, each)
            is_good = None if verdict is Verdict.UNKNOWN_KEY else verdict is Verdict.GOOD
            found.append(Signed(each["key_id"], each["scheme"], keyring.whose(each), is_good, True))
    return tuple(found)


def signed_by(files: Sequence[EntryFile], named: str) -> list[str]:
    """Return the keys of entries that a signing key has signed, or that claim so.

    `named` is a key file, or the first digits of the key's id, which `piecegraph cache show` prints. Raises
    `UsageError`, `CacheError`, OSError.
    """
    by_entry = {file.key: _key_ids(file) for file in files}
    if Path(named).is_file():
        wanted = read_signing_key(Path(named)).key_id
    else:
        ids = sorted({key_id for ids in by_entry.values() for key_id in ids if key_id.startswith(named.lower())})
        if len(named) < 4 or len(ids) != 1:
            found = f"{len(ids)} keys begin so: {', '.join(ids[:8])}" if ids else "no entry is signed by such a key"
            raise UsageError(
                f"--signed-by {named!r} names no one key ({found}). Give a key file, or at least 4 digits of the id "
                "that `piecegraph cache show` prints."
            )
        wanted = ids[0]
    return [key for key, ids in by_entry.items() if wanted in ids]


def _key_ids(file: EntryFile) -> set[str]:
    origin = file.entry.origin if file.entry is not None else ()
    return {key_id for each in (file.signature, *origin) if isinstance(key_id := each.get("key_id"), str)}
