from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.cache.trust.key_pair import PrivateKey, PublicKey, from_pem, new_pair_as_pem
from piecegraph.errors import CacheError

DATA = b"data"


@pytest.fixture
def private() -> PrivateKey:
    key = from_pem(new_pair_as_pem()[0])
    assert isinstance(key, PrivateKey)
    return key


def test_a_signature_verifies_only_what_was_signed(private: PrivateKey) -> None:
    value = private.sign("entry", DATA)["value"]
    for key in (private, private.public):
        assert key.verifies("entry", DATA, value)
        assert not key.verifies("entry", DATA + b" ", value)
        assert not key.verifies("archive", DATA, value)


def test_every_flipped_bit_of_a_signature_is_found(private: PrivateKey) -> None:
    value = private.sign("entry", DATA)["value"]
    flipped = [f"{int(value, 16) ^ 1 << bit:0128x}" for bit in range(512)]
    assert not [other for other in flipped if private.verifies("entry", DATA, other)]


def test_another_pairs_signature_does_not_fit(private: PrivateKey) -> None:
    other = from_pem(new_pair_as_pem()[0])
    assert isinstance(other, PrivateKey)
    assert other.key_id != private.key_id
    assert not private.verifies("entry", DATA, other.sign("entry", DATA)["value"])


def test_a_signature_has_one_spelling(private: PrivateKey) -> None:
    """Otherwise bits of a file could change unnoticed; one of the spellings is RFC 8032's S + L."""
    value = private.sign("entry", DATA)["value"]
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(bytes.fromhex(value[64:]), "little") + order
    again = value[:64] + s.to_bytes(32, "little").hex()
    for other in (value.upper(), " " + value, value[:64] + " " + value[64:], value + "00", "", "é", "\ud800", again):
        assert not private.verifies("entry", DATA, other), other


def test_a_public_key_cannot_sign_and_holds_no_secret() -> None:
    private_pem, public_pem = new_pair_as_pem()
    public = from_pem(public_pem)
    assert isinstance(public, PublicKey)
    assert not hasattr(public, "sign")
    assert not hasattr(public.key, "sign")
    private = from_pem(private_pem)
    assert isinstance(private, PrivateKey)
    assert private.key.private_bytes_raw().hex() not in repr(private)


@pytest.mark.parametrize("use", [new_pair_as_pem, lambda: from_pem(b"-----BEGIN PUBLIC KEY-----")])
def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, use: object) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert callable(use)
    with pytest.raises(CacheError, match="Run: pip install 'cryptography>=42'"):
        use()


def test_without_the_package_a_store_with_a_public_key_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package and does not call the key bad. Shared keys go on working."""
    (tmp_path / "pub").write_bytes(new_pair_as_pem()[1])
    (tmp_path / "shared").write_text("ab" * 32)
    (tmp_path / "shared").chmod(0o600)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(CacheError, match="need package cryptography"):
        Store.open(tmp_path / "cache", key_file=tmp_path / "own", signing_key_file=tmp_path / "pub")
    Store.open(tmp_path / "cache", key_file=tmp_path / "own", signing_key_file=tmp_path / "shared")


def test_the_package_is_imported_for_pem_files_alone(tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("ab" * 32)
    (tmp_path / "shared").chmod(0o600)
    (tmp_path / "pub").write_bytes(new_pair_as_pem()[1])
    code = """
import sys
from pathlib import Path
from piecegraph.cache.upkeep.archive import export_archive, import_archive
from tests.cache.cache_roots import a_store, loads, saved

here = Path(sys.argv[1])
store = a_store(here, signing_key_file=here / "shared")
assert loads(store, saved(store)) and store.list()[0].state == "complete"
export_archive(store, here / "archive", [store.list()[0].key])
import_archive(store, here / "archive")
before = "cryptography" in sys.modules
a_store(here, signing_key_file=here / "pub")
print(before, "cryptography" in sys.modules)
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("False True", "")
