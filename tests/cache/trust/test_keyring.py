from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from piecegraph.cache.trust.key_files import create_key_pair, read_signing_key
from piecegraph.cache.trust.key_pair import PrivateKey, PublicKey
from piecegraph.cache.trust.keyring import Keyring, Verdict
from piecegraph.cache.trust.shared_key import SharedKey

MINE, THEIRS = SharedKey(b"m" * 32), SharedKey(b"t" * 32)


def test_signatures_are_of_one_key_one_purpose_and_one_content() -> None:
    keyring = Keyring(MINE, (THEIRS,))
    for key in (MINE, THEIRS):
        signature = key.sign("entry", b"data")
        assert keyring.verify("entry", b"data", signature) is Verdict.GOOD
        assert keyring.verify("entry", b"date", signature) is Verdict.FORGED
        assert keyring.verify("archive", b"data", signature) is Verdict.FORGED
        assert Keyring().verify("entry", b"data", signature) is Verdict.UNKNOWN_KEY


@pytest.mark.parametrize("signature", [None, [], {}, {"scheme": "none"}, {"scheme": "hmac-sha256", "key_id": []}])
def test_a_malformed_signature_belongs_to_no_key(signature: object) -> None:
    assert Keyring(MINE).verify("entry", b"data", signature) is Verdict.UNKNOWN_KEY


@pytest.mark.parametrize("value", [None, 1, "", "é", b"x"])
def test_a_value_that_is_none_is_forged(value: object) -> None:
    signature = MINE.sign("entry", b"data") | {"value": value}
    assert Keyring(MINE).verify("entry", b"data", signature) is Verdict.FORGED


def test_a_secret_does_not_show() -> None:
    assert MINE.secret.hex() not in repr(MINE)
    assert MINE.secret.decode() not in repr(Keyring(MINE))
    assert MINE.key_id not in MINE.secret.hex()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[PrivateKey, PublicKey]:
    public = read_signing_key(create_key_pair(tmp_path / "pair.key"))
    private = read_signing_key(tmp_path / "pair.key")
    assert isinstance(private, PrivateKey)
    assert isinstance(public, PublicKey)
    return private, public


def test_a_public_key_knows_what_its_private_key_has_signed(pair: tuple[PrivateKey, PublicKey]) -> None:
    private, public = pair
    signature = private.sign("entry", b"data")
    for keyring in (Keyring(MINE, (public,)), Keyring(None, (private,)), Keyring(None, (THEIRS, public))):
        assert keyring.verify("entry", b"data", signature) is Verdict.GOOD
        assert keyring.verify("entry", b"date", signature) is Verdict.FORGED
        assert keyring.verify("archive", b"data", signature) is Verdict.FORGED
        assert keyring.verify("entry", b"data", signature | {"scheme": "ed448"}) is Verdict.UNKNOWN_KEY
    assert Keyring(MINE, (THEIRS,)).verify("entry", b"data", signature) is Verdict.UNKNOWN_KEY


def test_a_public_key_is_of_no_use_as_a_shared_one(pair: tuple[PrivateKey, PublicKey]) -> None:
    """A public value makes no signature, under either scheme."""
    public = pair[1]
    known = public.key.public_bytes_raw()
    for secret in (known, hashlib.sha256(known).digest()):
        forged = SharedKey(secret).sign("entry", b"data")
        assert Keyring(MINE, (public,)).verify("entry", b"data", forged) is Verdict.UNKNOWN_KEY
        renamed = forged | {"key_id": public.key_id}
        assert Keyring(MINE, (public,)).verify("entry", b"data", renamed) is Verdict.UNKNOWN_KEY
        assert Keyring(MINE, (public,)).verify("entry", b"data", renamed | {"scheme": "ed25519"}) is Verdict.FORGED
