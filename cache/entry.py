"""An entry: everything known of one compiled thing, in clear, and the digests of its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from piecegraph.cache.keys import key_of, key_of_plain, plain
from piecegraph.cache.layout import is_digest

FORMAT = 1
"""Of entries. An entry of another format is listed, and never loaded."""


class BadEntry(ValueError):
    """A document that is no entry; the store makes a miss of it."""


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob by its content."""

    digest: str  # sha256, hexadecimal
    size: int  # bytes

    @classmethod
    def of(cls, data: bytes) -> BlobRef:
        return cls(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Equal keys mean equal factors: `key` is `key_of(factors)`, which is checked before an entry is used."""

    key: str
    factors: Mapping[str, Any]  # plain JSON, all of what the key was made of
    blobs: Mapping[str, BlobRef]  # by role: "plan", "piece/<name>", ...
    created: float  # seconds since 1970, by the clock of who made it
    seconds: Mapping[str, float] = field(default_factory=dict)  # what making it took, by phase
    versions: Mapping[str, str] = field(default_factory=dict)  # of torch, triton, ours, ... for people
    notes: Mapping[str, Any] = field(default_factory=dict)  # plain JSON that decides nothing: model name, passes, ...
    state: str = "complete"
    format: int = FORMAT
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
        """The entry for `blobs`, by role. Raises `KeyFactorError` where a factor has no canonical form."""
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
        """Bytes of its blobs, each content once."""
        return sum({ref.digest: ref.size for ref in self.blobs.values()}.values())


_KNOWN = frozenset(f.name for f in fields(Entry)) - {"unknown"}


def to_document(entry: Entry) -> dict[str, Any]:
    """`entry` as JSON values."""
    document = {name: getattr(entry, name) for name in _KNOWN if name != "blobs"}
    blobs = {role: {"digest": ref.digest, "size": ref.size} for role, ref in entry.blobs.items()}
    return {**entry.unknown, **document, "blobs": blobs}


def from_document(document: Any) -> Entry:
    """The entry, with fields it does not know kept. Raises `BadEntry`, saying which field is wrong.

    An entry of another format is read as far as its fields mean what they do here. `check_key` is left to whoever
    goes on to use the entry: a listing need not hash the factors of all.
    """
    if not isinstance(document, dict):
        raise BadEntry("not a mapping")
    missing = sorted({"key", "factors", "blobs", "created", "format"} - document.keys())
    if missing:
        raise BadEntry(f"no {missing[0]}")
    known = {name: value for name, value in document.items() if name in _KNOWN}
    _check_types(known)
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
        raise BadEntry("key is no sha256")
    for name in ("factors", "blobs", "seconds", "versions", "notes"):
        if not isinstance(known.get(name, {}), dict):
            raise BadEntry(f"{name} is no mapping")
    if not all(_is_time(value) for value in (known["created"], *known.get("seconds", {}).values())):
        raise BadEntry("a time is no number of seconds")
    if not all(isinstance(value, str) for value in known.get("versions", {}).values()):
        raise BadEntry("a version is no string")
    if not isinstance(known.get("state", ""), str) or type(known["format"]) is not int:
        raise BadEntry("state or format is of the wrong type")


_MOST_SECONDS = 1e11
"""Since 1970: some year after 5000. A greater number is no time, and could not be shown as one."""
_MOST_BYTES = 1 << 60


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST_SECONDS


def blob_ref(role: str, ref: Any) -> BlobRef:
    """A blob of a document. Raises `BadEntry`, naming its role."""
    if not isinstance(ref, dict) or not is_digest(ref.get("digest")):
        raise BadEntry(f"blob {role!r} has no sha256")
    if type(ref.get("size")) is not int or not 0 <= ref["size"] < _MOST_BYTES:
        raise BadEntry(f"blob {role!r} has no size")
    return BlobRef(ref["digest"], ref["size"])
