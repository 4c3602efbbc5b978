"""Several keys at once: files, folders, and both; whatever cannot be taken is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.cache.trust.key_files import create_key_pair, read_signing_key
from piecegraph.cache.trust.trusted_keys import read_trusted_keys
from piecegraph.errors import UntrustedCache
from tests.cache.cache_roots import a_store, loads, saved


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Ids by name; `public/` has the public ones."""
    (tmp_path / "public").mkdir(mode=0o755)
    for name in ("old", "new"):
        create_key_pair(tmp_path / name).rename(tmp_path / "public" / name)
    return {name: read_signing_key(tmp_path / name).key_id for name in ("old", "new")}


def ids(named: str | Path | None) -> list[str]:
    return [key.key_id for key in read_trusted_keys(named)]


def test_files_and_folders_and_both(tmp_path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    both = f"{tmp_path}/new:{tmp_path}/public/old"
    assert ids(None) == []
    assert ids(tmp_path / "new") == [keys["new"]]
    assert ids(both) == [keys["new"], keys["old"]]
    assert ids(tmp_path / "public") == [keys["new"], keys["old"]]
    assert ids(f"{both}:{tmp_path}/public:") == [keys["new"], keys["old"]], "each once"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ids("~/old:~/public/new") == [keys["old"], keys["new"]]
    (tmp_path / "a:b").write_bytes((tmp_path / "public" / "old").read_bytes())
    assert ids(tmp_path / "a:b") == [keys["old"]], "the name of one file"


def test_hidden_files_of_a_folder_are_none(tmp_path: Path, keys: dict[str, str]) -> None:
    (tmp_path / "public" / ".swp").write_text("no key")
    assert len(ids(tmp_path / "public")) == 2


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("a missing file", "does not exist"),
        ("no key in a folder", "holds no signing key"),
        ("an empty folder", "holds no key file"),
        ("an open folder", "others can put keys there"),
        ("a link in a folder", "not a regular file"),
        ("a NUL", "has a NUL in it"),
        ("a device", "is a device. Name a regular file"),
        ("nothing", "does not exist|not a regular file|holds no"),
    ],
)
def test_a_key_file_that_cannot_be_read_is_an_error(tmp_path: Path, keys: dict[str, str], bad: str, why: str) -> None:
    named = f"{tmp_path}/new:{tmp_path}/public"
    if bad == "a missing file":
        named += f":{tmp_path}/none"
    elif bad == "no key in a folder":
        (tmp_path / "public" / "README").write_text("our keys")
    elif bad == "an empty folder":
        (tmp_path / "empty").mkdir()
        named = f"{tmp_path}/empty"
    elif bad == "an open folder":
        (tmp_path / "public").chmod(0o777)
    elif bad == "a link in a folder":
        (tmp_path / "public" / "link").symlink_to(tmp_path / "new")
    elif bad in ("a NUL", "a device"):
        named += {"a NUL": "\0", "a device": ":/dev/null"}[bad]
    else:
        named = ":"
    with pytest.raises(UntrustedCache, match=why):
        read_trusted_keys(named)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_folder_of_a_third_user_is_refused(tmp_path: Path, keys: dict[str, str]) -> None:
    os.chown(tmp_path / "public", 60001, 60001)
    with pytest.raises(UntrustedCache, match="belongs to user 60001"):
        read_trusted_keys(tmp_path / "public")


def test_a_reader_of_both_keys_reads_what_either_has_signed(tmp_path: Path, keys: dict[str, str]) -> None:
    """While the signer changes keys; and what only the old one has signed goes with it."""
    old = saved(a_store(tmp_path, signing_key_file=tmp_path / "old", publish=True), eps=1.0)
    publisher = a_store(tmp_path, signing_key_file=Path(f"{tmp_path}/new:{tmp_path}/public/old"), publish=True)
    new = saved(publisher, eps=2.0)
    assert loads(publisher, old)
    both = Store.open(tmp_path / "cache", key_file=tmp_path / "none", signing_key_file=tmp_path / "public")
    assert loads(both, old)
    assert loads(both, new)
    assert {row.state for row in both.list()} == {"complete"}
    after = Store.open(tmp_path / "cache", key_file=tmp_path / "none", signing_key_file=tmp_path / "public" / "new")
    assert {row.key: row.state for row in after.list()} == {old.key: "untrusted", new.key: "complete"}
