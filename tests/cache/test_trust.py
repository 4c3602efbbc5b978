"""Keys and folders that others could have had a hand in are refused, each with what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piecegraph.cache.trust import Access, Keyring, SigningKey, Verdict, check_folder, load_or_create_key, read_key
from piecegraph.errors import UntrustedCache

MINE, THEIRS = SigningKey(b"m" * 32), SigningKey(b"t" * 32)


def test_a_key_is_made_once_and_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "cache.key"
    key = load_or_create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_key(path) == read_key(path) == key
    assert len(key.secret) == 32
    assert list(path.parent.iterdir()) == [path]


def test_a_key_that_another_process_made_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our look and our link."""
    path = tmp_path / "cache.key"
    really_link = os.link

    def slower(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", really_link)
        other.append(load_or_create_key(path))
        really_link(source, target)

    other: list[SigningKey] = []
    monkeypatch.setattr(os, "link", slower)
    assert load_or_create_key(path) == other[0]


def test_a_key_others_may_read_or_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.key"
    key = load_or_create_key(path)
    path.chmod(0o640)
    with pytest.raises(UntrustedCache, match=f"chmod 600 {path}"):
        load_or_create_key(path)
    assert read_key(path, shared=True) == key
    path.chmod(0o664)
    with pytest.raises(UntrustedCache, match=f"chmod go-w {path}"):
        read_key(path, shared=True)


def test_another_users_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.key"
    load_or_create_key(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UntrustedCache, match=f"belongs to user {owner}"):
        read_key(path)


@pytest.mark.parametrize("content", [b"", b"ab", b"z" * 64, b"\xff" * 64, b"ab" * 33])
def test_a_damaged_key_is_refused_and_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cache.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UntrustedCache, match="holds no key"):
        load_or_create_key(path)
    assert path.read_bytes() == content


def test_a_link_to_a_key_is_refused(tmp_path: Path) -> None:
    load_or_create_key(tmp_path / "real")
    (tmp_path / "cache.key").symlink_to(tmp_path / "real")
    with pytest.raises(UntrustedCache, match="not a regular file"):
        load_or_create_key(tmp_path / "cache.key")


def test_signatures_are_of_one_key_one_purpose_and_one_content() -> None:
    keyring = Keyring(MINE, (THEIRS,))
    for key in (MINE, THEIRS):
        signature = key.sign("entry", b"data")
        assert keyring.verify("entry", b"data", signature) is Verdict.GOOD
        assert keyring.verify("entry", b"date", signature) is Verdict.FORGED
        assert keyring.verify("archive", b"data", signature) is Verdict.FORGED
        assert Keyring().verify("entry", b"data", signature) is Verdict.UNKNOWN_KEY


@pytest.mark.parametrize("signature", [None, [], {}, {"scheme": "none"}, {"scheme": "hmac-sha256", "key_id": []}])
def test_what_is_no_signature_is_by_no_key(signature: object) -> None:
    assert Keyring(MINE).verify("entry", b"data", signature) is Verdict.UNKNOWN_KEY


@pytest.mark.parametrize("value", [None, 1, "", "é", b"x"])
def test_a_value_that_is_none_is_forged(value: object) -> None:
    signature = MINE.sign("entry", b"data") | {"value": value}
    assert Keyring(MINE).verify("entry", b"data", signature) is Verdict.FORGED


def test_a_secret_does_not_show() -> None:
    assert MINE.secret.hex() not in repr(MINE)
    assert MINE.secret.decode() not in repr(Keyring(MINE))
    assert MINE.key_id not in MINE.secret.hex()


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_folder_others_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    for has_signing_key in (False, True):
        with pytest.raises(UntrustedCache, match=f"chmod go-w {tmp_path}"):
            check_folder(tmp_path, has_signing_key=has_signing_key)
    tmp_path.chmod(0o755)
    assert check_folder(tmp_path, has_signing_key=False) is Access.READ_WRITE


def test_a_link_to_a_folder_is_refused_and_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UntrustedCache, match=f"PIECEGRAPH_CACHE_DIR to where it leads: {tmp_path / 'real'}"):
        check_folder(tmp_path / "link", has_signing_key=True)


def test_another_users_folder_needs_a_signing_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UntrustedCache, match="chown -R"):
        check_folder(tmp_path, has_signing_key=False)
    assert check_folder(tmp_path, has_signing_key=True) is Access.READ_ONLY
