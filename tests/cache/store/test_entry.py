"""Entries: what a newer version adds is kept, and what is no entry says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from piecegraph.cache.disk.canonical import canonical_json
from piecegraph.cache.disk.layout import is_digest
from piecegraph.cache.store.entry import BadEntry, Entry, check_key, from_document, to_document
from piecegraph.cache.store.keys import key_of
from piecegraph.cache.store.store import Loaded, Miss, Saved
from piecegraph.cache.upkeep.collect import collect
from tests.cache.cache_roots import ANY_JSON, BLOBS, NOW, a_store, an_entry, loads, saved, tampered


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
        ({"key": "../x"}, "key is not a sha256"),
        ({"factors": []}, "factors is not a mapping"),
        ({"blobs": {"plan": None}}, "blob 'plan' has no sha256"),
        ({"blobs": {"plan": {"digest": "A" * 64, "size": 1}}}, "blob 'plan' has no sha256"),
        ({"blobs": {"plan": {"digest": "a" * 64, "size": True}}}, "blob 'plan' has no size"),
        ({"created": "now"}, "a time is not a number"),
        ({"created": 10**400}, "a time is not a number"),
        ({"created": float("nan")}, "a time is not a number"),
        ({"created": -1}, "a time is not a number"),
        ({"seconds": {"trace": None}}, "a time is not a number"),
        ({"blobs": {"plan": {"digest": "a" * 64, "size": 1 << 60}}}, "blob 'plan' has no size"),
        ({"versions": {"torch": 2}}, "a version is not a string"),
        ({"format": "1"}, "state or format"),
        ({"format": True}, "state or format"),
    ],
)
def test_a_document_that_is_not_an_entry_is_refused_with_a_reason(change: dict[str, Any], why: str) -> None:
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


any_many = settings(max_examples=300, deadline=None)
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `os.fsync` do nothing."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@any_many
@example(to_document(an_entry()) | {"created": 10**400})
@example(to_document(an_entry()) | {"created": -1e300, "seconds": {"trace": 10**400}})
@example(to_document(an_entry()) | {"blobs": {"plan": {"digest": "a" * 64, "size": 10**400}}})
@given(document=ANY_JSON | tampered(to_document(an_entry())))
def test_any_document_is_an_entry_or_says_why_not(document: Any) -> None:
    try:
        entry = from_document(document)
    except BadEntry:
        return
    assert from_document(to_document(entry)) == entry
    assert 0 <= entry.created < 1e11
    assert 0 <= entry.blob_bytes < 1 << 70


@pytest.mark.usefixtures("quick")
@many
@example(to_document(an_entry()) | {"created": 10**400}, False)
@example(to_document(an_entry()) | {"created": float("1e308")}, True)
@example(to_document(an_entry()) | {"blobs": {"plan": {"digest": "a" * 64, "size": 10**400}}}, False)
@given(document=ANY_JSON | tampered(to_document(an_entry())), is_signed=st.booleans())
def test_any_document_under_an_entrys_name_harms_nobody(tmp_path: Path, document: Any, is_signed: bool) -> None:
    """Signed or not: what looks at it gives an answer, and other entries are as before."""
    store = a_store(tmp_path)
    other = saved(store, eps=2.0)
    key = an_entry().key
    body = canonical_json(document)
    signature = store.signer.sign("entry", body) if is_signed else None
    store.layout.entry(key).write_bytes(canonical_json({"entry": document, "signature": signature}))
    assert {row.key for row in store.list()} == {key, other.key}
    assert all(row.size >= 0 and row.last_used <= NOW for row in store.list())
    collect(store.layout, now=NOW, max_bytes=10, older_than_s=5.0, dry_run=True)
    found = store.verify(key)
    if isinstance(found, Loaded):
        assert is_signed
        assert key_of(found.entry.factors) == key
    assert isinstance(store.load(key), Loaded) == isinstance(found, Loaded)
    assert loads(store, other)
    assert isinstance(store.save(an_entry(), BLOBS), Saved)
    assert loads(store, an_entry())


def is_plain(value: Any) -> bool:
    """No mapping in it has a key that is reserved."""
    return '"$' not in canonical_json(value).decode()


NAMES = st.text(max_size=12) | st.sampled_from(["../../../etc/passwd", "/etc/passwd", "..", "", "\0", "\ud800", "con"])


@pytest.mark.usefixtures("quick")
@many
@given(
    factors=st.dictionaries(NAMES.filter(lambda name: not name.startswith("$")), ANY_JSON.filter(is_plain), max_size=4),
    blobs=st.dictionaries(NAMES, st.binary(max_size=20), max_size=4),
    text=NAMES,
)
def test_whatever_the_names_what_is_saved_is_loaded_and_lies_in_the_root(
    tmp_path: Path, factors: dict[str, Any], blobs: dict[str, bytes], text: str
) -> None:
    """Names of factors, roles, versions and notes are data; no file is ever called by them."""
    store = a_store(tmp_path)
    entry = Entry.of(factors, blobs, created=NOW, versions={text: text}, notes={"note": text})
    assert isinstance(store.save(entry, blobs), Saved)
    assert loads(store, entry, blobs)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "user"}
    assert all(is_digest(path.name) for path in store.layout.blobs.iterdir())
    assert all(is_digest(path.stem) for path in store.layout.entries.iterdir())


def test_a_name_twice_in_one_document_is_no_entry(tmp_path: Path) -> None:
    """JSON's readers disagree on which of two counts."""
    store = a_store(tmp_path)
    entry = saved(store)
    path = store.layout.entry(entry.key)
    good = path.read_bytes()
    for once in (b'"blobs":', b'"entry":', b'"signature":', b'"size":'):
        path.write_bytes(good.replace(once, once + b"0," + once, 1))
        assert isinstance(store.load(entry.key), Miss)
        saved(store)


@pytest.mark.usefixtures("quick")
def test_a_document_with_very_many_of_everything_is_read(tmp_path: Path) -> None:
    """Thousands of roles of one blob: it is read once, and held once."""
    store = a_store(tmp_path)
    blobs = dict.fromkeys(map(str, range(20_000)), b"x" * 1000)
    entry = saved(store, blobs, many=list(range(20_000)))
    found = store.load(entry.key)
    assert isinstance(found, Loaded)
    assert len({id(data) for data in found.blobs.values()}) == 1
