"""Tests that the signers of an entry are shown, and that all entries that a key has signed can be removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.cache.trust.key_files import create_key_pair, read_signing_key
from piecegraph.cache.upkeep.archive import export_archive
from tests.tools.cache.models import CacheCommand, save_piece


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A key, and an archive of one piece that it has signed."""
    create_key_pair(tmp_path / "image.key")
    maker = Store.open(tmp_path / "maker", key_file=tmp_path / "maker.key", signing_key_file=tmp_path / "image.key")
    key = save_piece(maker, "theirs").key
    export_archive(maker, tmp_path / "archive", [key])
    return tmp_path / "image.key.pub"


def test_an_entry_of_ones_own_is_signed_by_oneself(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "mine").key
    (signed,) = cache.json("show", key)["signed_by"]
    assert signed == {
        "key_id": store.signer.key_id,
        "scheme": "hmac-sha256",
        "whose": "own",
        "is_good": True,
        "is_original": False,
    }
    assert f"signed by {store.signer.key_id} (hmac-sha256): your own key" in cache("show", key)


def test_an_import_tells_who_signed_before(store: Store, cache: CacheCommand, image: Path, tmp_path: Path) -> None:
    (key,) = cache.json("import", str(tmp_path / "archive"), "--signing-key", str(image))["keys"]
    image_id = read_signing_key(image).key_id
    signed = cache.json("show", key, "--signing-key", str(image))["signed_by"]
    assert [(each["whose"], each["is_good"], each["is_original"]) for each in signed] == [
        ("own", True, False),
        ("not held", None, True),
        ("configured", True, True),
    ]
    assert signed[2]["key_id"] == image_id
    assert f"{image_id} (ed25519): before it was imported, a key that you do not hold" in cache("show", key)


@pytest.mark.parametrize("named", ["the file", "its id", "the first digits"])
def test_all_entries_that_a_key_has_signed_are_removed(
    store: Store, cache: CacheCommand, image: Path, tmp_path: Path, named: str
) -> None:
    """This includes what was imported, and signed anew, since."""
    mine = save_piece(store, "mine").key
    (key,) = cache.json("import", str(tmp_path / "archive"), "--signing-key", str(image))["keys"]
    key_id = read_signing_key(image).key_id
    text = {"the file": str(image), "its id": key_id, "the first digits": key_id[:5].upper()}[named]
    assert cache.json("rm", "--signed-by", text, "-y")["removed"] == [key]
    assert [row["key"] for row in cache.json("ls")] == [mine]


@pytest.mark.parametrize("named", ["", "abc", "0000000000000000", "no such file"])
def test_a_key_that_signed_nothing_is_named(store: Store, cache: CacheCommand, named: str) -> None:
    key = save_piece(store, "mine").key
    cache("rm", "--signed-by", named, "-y", code=2)
    assert "names no one key" in cache.err
    cache("rm", "-y", code=2)
    cache("rm", key, "--signed-by", store.signer.key_id, "-y", code=2)
    assert "which entries?" in cache.err
    assert store.exists(key)


def test_several_signing_keys_are_given_by_repeating(
    store: Store, cache: CacheCommand, image: Path, tmp_path: Path
) -> None:
    other = create_key_pair(tmp_path / "other.key")
    both = ("--signing-key", str(other), "--signing-key", str(image))
    assert cache.json("import", str(tmp_path / "archive"), *both)["signed"]
