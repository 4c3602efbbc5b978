"""Key files that others could have had a hand in are refused, each with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from piecegraph.cache.trust.key_files import create_key_pair, load_or_create_own_key, read_own_key, read_signing_key
from piecegraph.cache.trust.key_pair import PrivateKey, PublicKey
from piecegraph.cache.trust.shared_key import SharedKey
from piecegraph.errors import CacheError, UntrustedCache


def test_a_key_is_made_once_and_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "cache.key"
    key = load_or_create_own_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_own_key(path) == read_own_key(path) == key
    assert len(key.secret) == 32
    assert list(path.parent.iterdir()) == [path]


def test_a_key_that_another_process_made_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our look and our link."""
    path = tmp_path / "cache.key"
    really_link = os.link

    def slower(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", really_link)
        other.append(load_or_create_own_key(path))
        really_link(source, target)

    other: list[SharedKey] = []
    monkeypatch.setattr(os, "link", slower)
    assert load_or_create_own_key(path) == other[0]


def test_a_key_others_may_read_or_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.key"
    key = load_or_create_own_key(path)
    path.chmod(0o640)
    with pytest.raises(UntrustedCache, match=f"chmod 600 {path}"):
        load_or_create_own_key(path)
    assert read_signing_key(path) == key
    path.chmod(0o664)
    with pytest.raises(UntrustedCache, match=f"chmod g-w,o-rwx {path}"):
        read_signing_key(path)


def test_another_users_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.key"
    load_or_create_own_key(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UntrustedCache, match=f"belongs to user {owner}"):
        read_own_key(path)


@pytest.mark.parametrize("content", [b"", b"ab", b"z" * 64, b"\xff" * 64, b"ab" * 33])
def test_a_damaged_key_is_refused_and_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cache.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UntrustedCache, match="holds no key"):
        load_or_create_own_key(path)
    assert path.read_bytes() == content


def test_a_link_to_a_key_is_refused(tmp_path: Path) -> None:
    load_or_create_own_key(tmp_path / "real")
    (tmp_path / "cache.key").symlink_to(tmp_path / "real")
    with pytest.raises(UntrustedCache, match="not a regular file"):
        load_or_create_own_key(tmp_path / "cache.key")


def test_a_pair_is_a_secret_and_a_file_for_everybody(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        public_path = create_key_pair(tmp_path / "image.key")
    finally:
        os.umask(before)
    assert public_path == tmp_path / "image.key.pub"
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "image.key": 0o600,
        "image.key.pub": 0o644,
    }
    private, public = read_signing_key(tmp_path / "image.key"), read_signing_key(public_path)
    assert isinstance(private, PrivateKey)
    assert isinstance(public, PublicKey)
    assert private.key_id == public.key_id
    assert public.verifies("entry", b"data", private.sign("entry", b"data")["value"])


@pytest.mark.parametrize("there", ["image.key", "image.key.pub"])
def test_creating_a_key_pair_overwrites_no_file(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("precious")
    with pytest.raises(CacheError, match=f"{tmp_path / there} is there already"):
        create_key_pair(tmp_path / "image.key")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "precious")]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644], ids=oct)
def test_a_private_key_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "it's a key"
    create_key_pair(path)
    path.chmod(mode)
    with pytest.raises(UntrustedCache, match="others may have had it") as refusal:
        read_signing_key(path)
    subprocess.run(["sh", "-ec", str(refusal.value).partition("Run: ")[2]], check=True)
    assert isinstance(read_signing_key(path), PrivateKey)


@pytest.mark.parametrize("mode", [0o664, 0o646], ids=oct)
def test_a_public_key_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = create_key_pair(tmp_path / "image.key")
    path.chmod(mode)
    with pytest.raises(UntrustedCache, match=f"Run: chmod go-w {path}"):
        read_signing_key(path)


def of_openssl(*arguments: str) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        subprocess.run(["openssl", "genpkey", "-out", str(path), *arguments], check=True, capture_output=True)

    return make


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes this key")


@needs_openssl
def test_a_key_pair_made_by_openssl_is_accepted(tmp_path: Path) -> None:
    of_openssl("-algorithm", "ed25519")(tmp_path / "key")
    command = ["openssl", "pkey", "-in", str(tmp_path / "key"), "-pubout", "-out", str(tmp_path / "pub")]
    subprocess.run(command, check=True)
    private, public = read_signing_key(tmp_path / "key"), read_signing_key(tmp_path / "pub")
    assert isinstance(private, PrivateKey)
    assert public.verifies("entry", b"data", private.sign("entry", b"data")["value"])


def two_in_one(path: Path) -> None:
    public = create_key_pair(path)
    path.write_bytes(path.read_bytes() + public.read_bytes())


NO_KEYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: path.touch(), "holds no signing key. Wanted: an Ed25519 key in PEM"),
    "text": (lambda path: path.write_text("secret"), "holds no signing key. Wanted:"),
    "half a PEM": (lambda path: path.write_text("-----BEGIN PUBLIC KEY-----\nMCow\n"), "a damaged key"),
    "a label alone": (lambda path: path.write_text("-----BEGIN OPENSSH PRIVATE KEY-----"), "a key of another kind"),
    "two": (two_in_one, "several keys"),
}


@pytest.mark.parametrize("content", NO_KEYS)
def test_a_file_that_is_not_a_signing_key_is_refused_with_a_reason(tmp_path: Path, content: str) -> None:
    make, why = NO_KEYS[content]
    make(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(UntrustedCache, match=why):
        read_signing_key(tmp_path / "key")


@needs_openssl
@pytest.mark.parametrize(
    "arguments",
    [
        ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"),
        ("-algorithm", "ed25519", "-aes-256-cbc", "-pass", "pass:word"),
    ],
    ids=["another algorithm", "a passphrase"],
)
def test_a_key_of_another_kind_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    of_openssl(*arguments)(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(UntrustedCache, match="a key of another kind. Wanted: an Ed25519 key in PEM, without a passphr"):
        read_signing_key(tmp_path / "key")


def test_a_missing_signing_key_says_how_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(UntrustedCache, match=f"Run: piecegraph cache keygen {tmp_path / 'key'}"):
        read_signing_key(tmp_path / "key")
