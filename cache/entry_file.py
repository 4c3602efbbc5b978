"""The file of an entry: the entry and a signature, in canonical JSON, read without trusting a byte of it."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piecegraph.cache.canonical import canonical_json, parse_canonical
from piecegraph.cache.entry import FORMAT, BadEntry, Entry, from_document, to_document
from piecegraph.cache.files import NotARegularFile, read_regular
from piecegraph.cache.keyring import Keyring, Signer, Verdict
from piecegraph.cache.layout import Layout
from piecegraph.cache.signed_list import NOTHING, file_digest

MAX_ENTRY_BYTES = 64 << 20
"""More than any entry has; a larger file is not read to its end."""


class MissReason(enum.Enum):
    """Why there is nothing to load."""

    ABSENT = "absent"
    CORRUPT = "corrupt"  # the entry's bytes are not what was written, or lie under another key
    FORGED = "forged"  # signed with a key of ours, it says, and is not
    UNTRUSTED = "untrusted"  # signed with a key we do not hold, or not at all
    OTHER_VERSION = "other version"
    UNREADABLE = "unreadable"  # the disk or its permissions
    BLOB_MISSING = "blob missing"
    BLOB_CORRUPT = "blob corrupt"


IS_BAD_FILE = frozenset({MissReason.CORRUPT, MissReason.FORGED})
"""An entry's file that will never be good again."""


@dataclass(frozen=True, slots=True)
class EntryFile:
    """What was found under a key. Only where `problem` is None may anything be done on the entry's word."""

    key: str
    problem: MissReason | None = None
    detail: str = ""
    entry: Entry | None = None  # to be shown, even if it is not to be trusted; None where it cannot be made out
    size: int = 0  # bytes of the file


def write_document(entry: Entry, key: Signer) -> bytes:
    """The bytes of the entry's file."""
    document = to_document(entry)
    return canonical_json({"entry": document, "signature": key.sign("entry", canonical_json(document))})


def read_entry_file(layout: Layout, key: str, keyring: Keyring, signed: Mapping[str, str] = NOTHING) -> EntryFile:
    """What lies under `key`; raises nothing. `signed`: what `read_signed_list` gave; spares those entries' own."""
    try:
        data = read_regular(layout.entry(key), MAX_ENTRY_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return EntryFile(key, MissReason.ABSENT)
    except NotARegularFile as error:
        return EntryFile(key, MissReason.CORRUPT, str(error.strerror))
    except OSError as error:
        return EntryFile(key, MissReason.UNREADABLE, str(error))
    problem, detail, entry = _judge(key, data, keyring, signed)
    return EntryFile(key, problem, detail, entry, len(data))


def _judge(
    key: str, data: bytes, keyring: Keyring, signed: Mapping[str, str]
) -> tuple[MissReason | None, str, Entry | None]:
    document = _signed_document(data, keyring, key in signed and signed[key] == file_digest(data))
    if document is not None:
        return _judge_signed(key, document)
    try:
        file = parse_canonical(data)
    except ValueError as error:
        return MissReason.CORRUPT, f"no canonical JSON: {error}", None
    if not isinstance(file, dict) or set(file) != {"entry", "signature"}:
        return MissReason.CORRUPT, "not an entry and a signature", None
    document, signature = file["entry"], file["signature"]
    verdict = keyring.verify("entry", canonical_json(document), signature)
    entry, _ = _entry_of(document)
    if verdict is Verdict.FORGED:
        return MissReason.FORGED, "the signature does not fit", entry
    if verdict is Verdict.UNKNOWN_KEY:
        return MissReason.UNTRUSTED, "signed with a key that is not configured, or not at all", entry
    return _judge_signed(key, document)


def _judge_signed(key: str, document: Any) -> tuple[MissReason | None, str, Entry | None]:
    """What to make of a document whose signature is good."""
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


def _signed_document(data: bytes, keyring: Keyring, is_known_good: bool) -> Any:
    """The document, if its very bytes are signed by a key of ours; None leaves it to a closer look.

    Most entries are; they need not be written out again to be compared with, which is what takes time in a listing.
    """
    found = _AS_WE_WRITE_IT.fullmatch(data)
    if found is None:
        return None
    if not is_known_good and keyring.verify("entry", found[1], json.loads(found[2])) is not Verdict.GOOD:
        return None
    try:
        return json.loads(found[1])
    except (ValueError, RecursionError):
        return None


def _entry_of(document: Any) -> tuple[Entry | None, str]:
    """The entry, or what is wrong with it."""
    try:
        return from_document(document), ""
    except BadEntry as error:
        return None, str(error)
