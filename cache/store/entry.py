"""An entry: all that is known of one compiled thing, in plain text, and the digests of its bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from piecegraph.cache.disk.layout import is_digest
from piecegraph.cache.store.keys import key_of, key_of_plain, plain

FORMAT = 1
"""The format of entries. An entry of another format is listed, but never loaded."""


class BadEntry(ValueError):
    """The error that a document is not an entry; the store reports a miss for it."""


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A reference to a blob by its content."""

    digest: str  # sha256, hexadecimal
    size: int  # bytes

    @classmethod
    def of(cls, data: bytes) -> BlobRef:
        return cls(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the store. `key` is `key_of(factors)`, which is checked before the entry is used."""

    key: str
    factors: Mapping[str, Any]  # plain JSON, all of what the key was made of
    blobs: Mapping[str, BlobRef]  # by role: "plan", "piece/<name>", ...
    created: float  # seconds since 1970, by the clock of who made it
    seconds: Mapping[str, float] = field(default_factory=dict)  # what making it took, by phase
    versions: Mapping[str, str] = field(default_factory=dict)  # of torch, triton, ours, ... for people
    notes: Mapping[str, Any] = field(default_factory=dict)  # plain JSON that decides nothing: model name, passes, ...
    state: str = "complete"
    format: int = FORMAT
    origin: tuple[Mapping[str, str], ...] = ()  # signatures of who made and who exported it, of it without this field
    unknown: Mapping[str, Any] = field(default_factory=dict)  # fields a newer version wrote; kept as they are

    @classmethod
    def of(
        cls,
        factors: Mapping[str, Any],
        blobs: Mapping[str, bytes],
        *,
        created: float,
        seconds: Mapping[str, float] | None = None,
        versions: Mapping[str, str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Return the entry for `blobs`, by role. Raises `KeyFactorError` if a factor has no canonical form."""
        return cls(
            key=key_of(factors),
            factors=plain(factors),
            blobs={role: BlobRef.of(data) for role, data in blobs.items()},
            created=created,
            seconds=dict(seconds or {}),
            versions=dict(versions or {}),
            notes=plain(notes or {}),
        )

    @property
    def blob_bytes(self) -> int:
        """The number of bytes of the entry's blobs, each content once."""
        return sum({ref.digest: ref.size for ref in self.blobs.values()}.values())


_KNOWN = frozenset(f.name for f in fields(Entry)) - {"unknown"}


def to_document(entry: Entry) -> dict[str, Any]:
    """`entry` as JSON values."""
    document = {name: getattr(entry, name) for name in _KNOWN if name not in ("blobs", "origin")}
    if entry.origin:
        document["origin"] = [dict(signature) for signature in entry.origin]
    blobs = {role: {"digest": ref.digest, "size": ref.size} for role, ref in entry.blobs.items()}
    return {**entry.unknown, **document, "blobs": blobs}


def from_document(document: Any) -> Entry:
    """Return the entry of a document. Fields that this version does not know are kept.

    Raises `BadEntry` with the wrong field, if the fields do not mean what they mean here. `check_key` is left to the
    caller that goes on to use the entry: a listing need not hash the factors of all.
    """
    if not isinstance(document, dict):
        raise BadEntry("not a mapping")
    missing = sorted({"key", "factors", "blobs", "created", "format"} - document.keys())
    if missing:
        raise BadEntry(f"no {missing[0]}")
    known = {name: value for name, value in document.items() if name in _KNOWN}
    _check_types(known)
    known["origin"] = _signatures(document.get("origin", []))
    known["blobs"] = {role: blob_ref(role, ref) for role, ref in document["blobs"].items()}
    unknown = {name: value for name, value in document.items() if name not in _KNOWN}
    return Entry(**known, unknown=unknown)


def check_key(entry: Entry) -> None:
    """Raise `BadEntry` unless the entry's key is that of its factors."""
    try:
        right = entry.key == key_of_plain(entry.factors)
    except (ValueError, RecursionError):  # NaN, or a nest deeper than any we write
        right = False
    if not right:
        raise BadEntry("the key is not that of the factors")


def _check_types(known: Mapping[str, Any]) -> None:
    """Raise `BadEntry` for a field of the wrong type."""
    if not is_digest(known["key"]):
        raise BadEntry("key is not a sha256")
    for name in ("factors", "blobs", "seconds", "versions", "notes"):
        if not isinstance(known.get(name, {}), dict):
            raise BadEntry(f"{name} is not a mapping")
    if not all(_is_time(value) for value in (known["created"], *known.get("seconds", {}).values())):
        raise BadEntry("a time is not a number of seconds")
    if not all(isinstance(value, str) for value in known.get("versions", {}).values()):
        raise BadEntry("a version is not a string")
    if not isinstance(known.get("state", ""), str) or type(known["format"]) is not int:
        raise BadEntry("state or format is of the wrong type")


MAX_SIGNATURES = 32
_SIGNATURE_FIELDS = {
    "scheme": re.compile(r"[0-9a-z-]{1,32}"),
    "key_id": re.compile(r"[0-9a-f]{16}"),
    "value": re.compile(r"[0-9a-f]{1,512}"),
}


def _signatures(found: Any) -> tuple[Mapping[str, str], ...]:
    """Return the signatures of a document, checked for their form only. Raises `BadEntry`."""
    if not isinstance(found, list) or len(found) > MAX_SIGNATURES:
        raise BadEntry("origin is not a list of signatures")
    for each in found:
        if not isinstance(each, dict) or each.keys() != _SIGNATURE_FIELDS.keys():
            raise BadEntry("origin is not a list of signatures")
        if not all(
            isinstance(each[name], str) and form.fullmatch(each[name]) for name, form in _SIGNATURE_FIELDS.items()
        ):
            raise BadEntry("a signature of origin is malformed")
    return tuple(found)


_MAX_SECONDS = 1e11
"""The greatest time in seconds since 1970 (some year after 5000). A greater number could not be shown as a time."""
_MAX_BLOB_BYTES = 1 << 60


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MAX_SECONDS


def blob_ref(role: str, ref: Any) -> BlobRef:
    """Return a blob of a document. Raises `BadEntry`, naming the blob's role."""
    if not isinstance(ref, dict) or not is_digest(ref.get("digest")):
        raise BadEntry(f"blob {role!r} has no sha256")
    if type(ref.get("size")) is not int or not 0 <= ref["size"] < _MAX_BLOB_BYTES:
        raise BadEntry(f"blob {role!r} has no size")
    return BlobRef(ref["digest"], ref["size"])
