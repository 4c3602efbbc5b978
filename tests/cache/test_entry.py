"""Entries: what a newer version adds is kept, and what is no entry says why."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph.cache.entry import BadEntry, check_key, from_document, to_document
from piecegraph.cache.keys import key_of
from tests.cache.cache_roots import an_entry


def test_a_document_makes_the_same_entry() -> None:
    entry = an_entry()
    assert from_document(to_document(entry)) == entry
    assert entry.blob_bytes == 5 + 1200
    assert entry.key == key_of(entry.factors)


def test_fields_of_a_newer_version_are_kept() -> None:
    document = to_document(an_entry()) | {"colour": ["blue"]}
    entry = from_document(document)
    assert entry.unknown == {"colour": ["blue"]}
    assert to_document(entry) == document


def test_fields_that_may_be_left_out_may() -> None:
    document = to_document(an_entry())
    for name in ("seconds", "versions", "notes", "state"):
        del document[name]
    assert from_document(document).state == "complete"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"key": "../x"}, "key is no sha256"),
        ({"factors": []}, "factors is no mapping"),
        ({"blobs": {"plan": None}}, "blob 'plan' has no sha256"),
        ({"blobs": {"plan": {"digest": "A" * 64, "size": 1}}}, "blob 'plan' has no sha256"),
        ({"blobs": {"plan": {"digest": "a" * 64, "size": True}}}, "blob 'plan' has no size"),
        ({"created": "now"}, "a time is no number"),
        ({"seconds": {"trace": None}}, "a time is no number"),
        ({"versions": {"torch": 2}}, "a version is no string"),
        ({"format": "1"}, "state or format"),
        ({"format": True}, "state or format"),
    ],
)
def test_what_is_no_entry_says_why(change: dict[str, Any], why: str) -> None:
    with pytest.raises(BadEntry, match=why):
        from_document(to_document(an_entry()) | change)


@pytest.mark.parametrize("name", ["key", "factors", "blobs", "created", "format"])
def test_what_an_entry_must_have_is_named(name: str) -> None:
    document = to_document(an_entry())
    del document[name]
    with pytest.raises(BadEntry, match=f"no {name}"):
        from_document(document)


@pytest.mark.parametrize(
    "change",
    [{"key": "0" * 64}, {"factors": {"eps": 1e-7}}, {"factors": {"$odd": 1}}, {"factors": {"x": float("nan")}}],
)
def test_a_key_of_other_factors_is_found(change: dict[str, Any]) -> None:
    check_key(an_entry())
    with pytest.raises(BadEntry, match="not that of the factors"):
        check_key(from_document(to_document(an_entry()) | change))
