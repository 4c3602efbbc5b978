"""The file of an entry: the entry and a signature in canonical JSON, read without trusting any byte."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.disk.files import NotARegularFile, read_regular
from piecegraph.cache.disk.layout import Layout
from piecegraph.cache.store.entry import FORMAT, BadEntry, Entry, from_document, to_document
from piecegraph.cache.trust.keyring import Keyring, Signer, Verdict
from piecegraph.cache.trust.signed_list import NOTHING, file_digest

MAX_ENTRY_BYTES = 64 << 20
"""The size limit of an entry's file; a larger file is not read to its end."""


class MissReason(enum.Enum):
    """The reason why an entry cannot be loaded."""

    ABSENT = "absent"
    CORRUPT = "corrupt"  # the bytes are not those that were written, or the file has another entry's name
    FORGED = "forged"  # the signature names a key that we hold, and that key did not make it
    UNTRUSTED = "untrusted"  # signed with a key we do not hold, or not at all
    OTHER_VERSION = "other version"
    UNREADABLE = "unreadable"  # the disk or its permissions
    BLOB_MISSING = "blob missing"
    BLOB_CORRUPT = "blob corrupt"


IS_BAD_FILE = frozenset({MissReason.CORRUPT, MissReason.FORGED})
"""The reasons for which an entry's file will never be good again."""


@dataclass(frozen=True, slots=True)
class EntryFile:
    """The file found under a key. The entry may be used only if `problem` is None."""

    key: str
    problem: MissReason | None = None
    detail: str = ""
    entry: Entry | None = None  # for display, even if it is not trusted; None if it cannot be parsed
    size: int = 0  # bytes of the file
    signature: Mapping[str, Any] = field(default_factory=dict)  # as found in the file; empty if it is not a mapping


def write_document(entry: Entry, key: Signer) -> bytes:
    """Return the bytes of the entry's file."""
    document = to_document(entry)
    return canonical_json({"entry": document, "signature": key.sign("entry", canonical_json(document))})


def read_entry_file(layout: Layout, key: str, keyring: Keyring, signed: Mapping[str, str] = NOTHING) -> EntryFile:
    """Return the file under `key`. Raises nothing.

    `signed` is the result of `read_signed_list`; signatures of the entries in it are not verified again.
    """
    try:
        data = read_regular(layout.entry(key), MAX_ENTRY_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return EntryFile(key, MissReason.ABSENT)
    except NotARegularFile as error:
        return EntryFile(key, MissReason.CORRUPT, str(error.strerror))
    except OSError as error:
        return EntryFile(key, MissReason.UNREADABLE, str(error))
    problem, detail, entry, signature = _judge(key, data, keyring, signed)
    return EntryFile(key, problem, detail, entry, len(data), signature if isinstance(signature, dict) else {})


def _judge(
    key: str, data: bytes, keyring: Keyring, signed: Mapping[str, str]
) -> tuple[MissReason | None, str, Entry | None, Any]:
    document, signature = _signed_document(data, keyring, key in signed and signed[key] == file_digest(data))
    if document is not None:
        return *_judge_signed(key, document), signature
    try:
        file = parse_canonical(data)
    except ValueError as error:
        return MissReason.CORRUPT, f"no canonical JSON: {error}", None, None
    if not isinstance(file, dict) or set(file) != {"entry", "signature"}:
        return MissReason.CORRUPT, "not an entry and a signature", None, None
    document, signature = file["entry"], file["signature"]
    verdict = keyring.verify("entry", canonical_json(document), signature)
    entry, _ = _entry_of(document)
    if verdict is Verdict.FORGED:
        return MissReason.FORGED, "the signature does not fit", entry, signature
    if verdict is Verdict.UNKNOWN_KEY:
        return MissReason.UNTRUSTED, "signed with a key that is not configured, or not at all", entry, signature
    return *_judge_signed(key, document), signature


def _judge_signed(key: str, document: Any) -> tuple[MissReason | None, str, Entry | None]:
    """Return the problem of a document whose signature is good, its detail, and the entry."""
    entry, wrong = _entry_of(document)
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is int and version != FORMAT:
        return MissReason.OTHER_VERSION, f"format {version}; this version reads {FORMAT}", entry
    if entry is None:
        return MissReason.CORRUPT, wrong, None
    if entry.key != key:
        return MissReason.CORRUPT, f"it is the entry of {entry.key}", entry
    return None, "", entry


_AS_WE_WRITE_IT = re.compile(
    rb'\{"entry":(.*),"signature":'
    rb'(\{"key_id":"[0-9a-f]{16}","scheme":"[0-9a-z-]+","value":"[0-9a-f]+"\})\}'
)


def _signed_document(data: bytes, keyring: Keyring, is_known_good: bool) -> tuple[Any, Any]:
    """Return the document and its signature if its very bytes are signed by one of our keys; else None for both.

    This is the fast path for most entries: they need not be serialised again for comparison, which takes most of the
    time of a listing. If the result is None, the caller parses the file in full to find the reason.
    """
    found = _AS_WE_WRITE_IT.fullmatch(data)
    if found is None:
        return None, None
    signature = json.loads(found[2])
    if not is_known_good and keyring.verify("entry", found[1], signature) is not Verdict.GOOD:
        return None, None
    try:
        return json.loads(found[1]), signature
    except (ValueError, RecursionError):
        return None, None


def _entry_of(document: Any) -> tuple[Entry | None, str]:
    """Return the entry, or None and what is wrong with the document."""
    try:
        return from_document(document), ""
    except BadEntry as error:
        return None, str(error)
