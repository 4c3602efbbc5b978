"""Refusals of untrusted folders and keys: the command in each message, run as it stands, fixes the cause.

The tests cover `cache/trust/folder_trust.py`, `cache/trust/key_files.py` and `cache/store/store.py`, on real folders of
real users if they run as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import piecegraph
from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Loaded, NotSaved, Saved, Store
from piecegraph.cache.trust.folder_trust import Access
from piecegraph.cache.trust.key_files import create_key_pair
from piecegraph.cache.trust.key_pair import PrivateKey
from piecegraph.errors import UntrustedCache
from tests.cache.cache_roots import BLOBS, an_entry, loads, start

# Later Pythons warn where other tests have left threads; the children here run our own Python only, and exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

SOMEONE, ANOTHER = 60001, 60002
"""Users that need no account."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder whose name a shell would split."""
    (tmp_path / "it's my home").mkdir()
    return tmp_path / "it's my home"


def opened(home: Path, signing_key_file: Path | None = None) -> Store:
    return Store.open(home / "cache", key_file=home / "cache.key", signing_key_file=signing_key_file)


def filled(home: Path) -> Entry:
    entry = an_entry()
    assert isinstance(opened(home).save(entry, BLOBS), Saved)
    return entry


def mended(open_it: Callable[[], Store]) -> Store:
    """The store, once the commands of its refusals have been run; at least one."""
    refusals = []
    while True:
        try:
            store = open_it()
        except UntrustedCache as refusal:
            refusals.append(str(refusal))
            assert len(refusals) < 10, refusals
            command = refusals[-1].partition("Run: ")[2]
            subprocess.run(["sh", "-ec", command], check=True)
        else:
            assert refusals
            return store


FOLDERS = ("", "v1", "v1/entries", "v1/blobs", "v1/quarantine", "v1/locks", "v1/temp", "v1/used")


@pytest.mark.parametrize("mode", [0o775, 0o707, 0o1777], ids=oct)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_others_write_is_mended_by_the_command(home: Path, folder: str, mode: int) -> None:
    entry = filled(home)
    (home / "cache" / folder).chmod(mode)
    assert loads(mended(lambda: opened(home)), entry)


def test_a_cache_that_others_write_everywhere_is_mended_by_the_commands(home: Path) -> None:
    entry = filled(home)
    for path in [home / "cache", *(home / "cache").rglob("*/")]:
        path.chmod(0o777)
    assert loads(mended(lambda: opened(home)), entry)


@as_root
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_another_user_is_mended_by_the_command(home: Path, folder: str) -> None:
    entry = filled(home)
    os.chown(home / "cache" / folder, SOMEONE, SOMEONE)
    assert loads(mended(lambda: opened(home)), entry)


def test_a_link_to_a_cache_is_mended_by_the_folder_it_names(home: Path) -> None:
    entry = filled(home)
    (home / "cache").rename(home / "real")
    (home / "cache").symlink_to(home / "real")
    with pytest.raises(UntrustedCache) as refusal:
        opened(home)
    leads_to = str(refusal.value).partition("PIECEGRAPH_CACHE_DIR to where it leads: ")[2]
    assert loads(Store.open(Path(leads_to), key_file=home / "cache.key"), entry)


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_a_link_inside_a_cache_is_mended_by_the_command(home: Path, folder: str) -> None:
    """The entries that the link led to are compiled again."""
    entry = filled(home)
    (home / "cache" / folder).rename(home / "elsewhere")
    (home / "cache" / folder).symlink_to(home / "elsewhere")
    store = mended(lambda: opened(home))
    assert isinstance(store.save(entry, BLOBS), Saved)
    assert loads(store, entry)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_in_place_of_a_folder_is_mended_by_the_command(home: Path, folder: str) -> None:
    entry = filled(home)
    shutil.rmtree(home / "cache" / folder)
    (home / "cache" / folder).write_text("a file")
    store = mended(lambda: opened(home))
    assert isinstance(store.save(entry, BLOBS), Saved)
    assert loads(store, entry)


def make_a_link(path: Path) -> None:
    path.rename(path.with_name("real.key"))
    path.symlink_to(path.with_name("real.key"))


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").write_text("x")


BAD_KEYS: dict[str, Callable[[Path], object]] = {
    "read by others": lambda path: path.chmod(0o640),
    "written by others": lambda path: path.chmod(0o622),
    "damaged": lambda path: path.write_text("ab"),
    "a link": make_a_link,
    "a folder": make_a_folder,
}


@pytest.mark.parametrize("bad", [*BAD_KEYS, pytest.param("another user's", marks=as_root)])
def test_a_key_that_is_refused_is_mended_by_the_command(home: Path, bad: str) -> None:
    entry = filled(home)
    if bad == "another user's":
        os.chown(home / "cache.key", SOMEONE, SOMEONE)
    else:
        BAD_KEYS[bad](home / "cache.key")
    store = mended(lambda: opened(home))
    assert isinstance(store.save(entry, BLOBS), Saved)
    assert loads(store, entry)


@pytest.fixture
def piecegraph_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by shells."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "piecegraph").write_text(
        f"#!{sys.executable}\nimport sys\nfrom piecegraph.tools.cli import main\nsys.exit(main())\n"
    )
    (commands / "piecegraph").chmod(0o700)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(piecegraph.__file__).parent.parent))


@pytest.mark.usefixtures("piecegraph_command")
def test_a_signing_key_that_is_missing_is_made_by_the_command(home: Path) -> None:
    store = mended(lambda: opened(home, signing_key_file=home / "signing.key"))
    assert (home / "signing.key").stat().st_mode & 0o777 == 0o600
    assert isinstance(store.save(an_entry(), BLOBS), Saved)


@pytest.mark.usefixtures("piecegraph_command")
@pytest.mark.parametrize("bad", ["read by others", "written by others", "a link"])
def test_a_private_key_that_is_refused_is_mended_by_the_commands(home: Path, bad: str) -> None:
    """Where it was moved away, by the command for a missing key as well."""
    create_key_pair(home / "signing.key")
    BAD_KEYS[bad](home / "signing.key")
    (home / "signing.key.pub").unlink()
    store = mended(lambda: opened(home, signing_key_file=home / "signing.key"))
    assert isinstance(store.export_signer, PrivateKey)


@as_root
@pytest.mark.parametrize("kind", ["private", "public", "shared"])
def test_a_signing_key_of_a_third_user_is_mended_by_the_command(home: Path, kind: str) -> None:
    """Its owner could put another key there, and sign what we run."""
    public = create_key_pair(home / "signing.key")
    path = public if kind == "public" else home / "signing.key"
    if kind == "shared":
        path.write_text("ab" * 32)
    os.chown(path, SOMEONE, SOMEONE)
    store = mended(lambda: opened(home, signing_key_file=path))
    assert path.stat().st_uid == 0
    assert store.keyring.trusted


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602], ids=oct)
def test_a_shared_key_that_all_may_read_is_mended_by_the_command(home: Path, mode: int) -> None:
    """Whoever reads it can sign; its group may."""
    (home / "signing.key").write_text("ab" * 32)
    (home / "signing.key").chmod(mode)
    store = mended(lambda: opened(home, signing_key_file=home / "signing.key"))
    assert (home / "signing.key").stat().st_mode & 0o777 == mode & 0o640
    assert store.keyring.trusted


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody can look into."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_user(user: int, body: Callable[[], None]) -> int:
    def demoted() -> None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        body()

    return os.waitstatus_to_exitcode(os.waitpid(start(demoted), 0)[1])


@as_root
def test_an_image_of_roots_is_read_by_a_group_that_has_the_signing_key(shared: Path) -> None:
    """Really as another user; root's build had a careful umask. Nobody outside the key's group can read it."""
    key = shared / "signing.key"
    key.write_text("ab" * 32)
    key.chmod(0o640)
    os.chown(key, 0, SOMEONE)
    before = os.umask(0o077)
    try:
        builder = Store.open(shared / "cache", key_file=shared / "root.key", signing_key_file=key, publish=True)
        entry = an_entry()
        assert isinstance(builder.save(entry, BLOBS), Saved)
    finally:
        os.umask(before)

    def read_it() -> None:
        store = Store.open(shared / "cache", key_file=shared / "no.key", signing_key_file=key)
        assert store.access is Access.READ_ONLY
        assert loads(store, entry)
        assert isinstance(store.save(entry, BLOBS), NotSaved)

    def refused_without_the_key() -> None:
        with pytest.raises(UntrustedCache, match=f"belongs to user 0, and you are {os.geteuid()}"):
            Store.open(shared / "cache", key_file=shared / "no.key")

    files = sorted(shared.rglob("*"))
    assert as_user(SOMEONE, read_it) == 0
    assert as_user(SOMEONE, refused_without_the_key) == 0
    assert as_user(ANOTHER, read_it) != 0
    assert sorted(shared.rglob("*")) == files


@as_root
def test_an_image_of_roots_is_read_with_the_public_key_alone(shared: Path) -> None:
    """By any user, none of whom can sign: the private key is root's."""
    before = os.umask(0o077)
    try:
        public = create_key_pair(shared / "image.key")
        builder = Store.open(
            shared / "cache", key_file=shared / "root.key", signing_key_file=shared / "image.key", publish=True
        )
        entry = an_entry()
        assert isinstance(builder.save(entry, BLOBS), Saved)
    finally:
        os.umask(before)

    def read_it() -> None:
        store = Store.open(shared / "cache", key_file=shared / "no.key", signing_key_file=public)
        assert store.access is Access.READ_ONLY
        assert loads(store, entry)
        assert isinstance(store.save(entry, BLOBS), NotSaved)

    def has_no_private_key() -> None:
        with pytest.raises(PermissionError):
            Store.open(shared / "cache", key_file=shared / "no.key", signing_key_file=shared / "image.key")

    def cannot_read_roots_own_key() -> None:
        """Whose environment is still root's."""
        store = Store.open(shared / "cache", key_file=shared / "private" / "root.key", signing_key_file=public)
        assert loads(store, entry)

    (shared / "private").mkdir(mode=0o700)
    files = sorted(shared.rglob("*"))
    assert as_user(SOMEONE, cannot_read_roots_own_key) == 0
    for user in (SOMEONE, ANOTHER):
        assert as_user(user, read_it) == 0
        assert as_user(user, has_no_private_key) == 0
    assert sorted(shared.rglob("*")) == files
    assert loads(Store.open(shared / "cache", key_file=shared / "root.key", signing_key_file=public), entry)


@as_root
def test_what_another_user_planted_in_roots_image_is_not_loaded(shared: Path) -> None:
    """A cache of somebody else's with a key of theirs, put where ours was expected."""
    shared.chmod(0o777)

    def plant() -> None:
        store = Store.open(shared / "cache", key_file=shared / "their.key")
        assert isinstance(store.save(an_entry(), BLOBS), Saved)

    assert as_user(SOMEONE, plant) == 0
    key = shared / "signing.key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    with pytest.raises(UntrustedCache, match=f"belongs to user {SOMEONE}"):
        Store.open(shared / "cache", key_file=shared / "root.key")
    found = Store.open(shared / "cache", key_file=shared / "root.key", signing_key_file=key).load(an_entry().key)
    assert not isinstance(found, Loaded)
    assert found.reason.value == "untrusted"
