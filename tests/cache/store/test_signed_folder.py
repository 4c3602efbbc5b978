"""A signed folder: whatever is not as it was signed is refused, with what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.store.signed_folder import LIST, SignedFolderError, check_signed_folder, sign_folder
from piecegraph.cache.trust.keyring import Keyring
from piecegraph.cache.trust.known_digests import KnownDigests
from piecegraph.cache.trust.shared_key import SharedKey

MINE, THEIRS = SharedKey(b"m" * 32), SharedKey(b"t" * 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir(mode=0o700)
    (made / "config.json").write_text("{}")
    (made / "weights").write_bytes(b"weights" * 1000)
    for file in made.iterdir():
        file.chmod(0o600)
    sign_folder(made, "source 1", [MINE], digests(tmp_path))
    return made


def digests(tmp_path: Path) -> KnownDigests:
    return KnownDigests(tmp_path / "digests.json", Keyring(MINE))


def check(folder: Path, keyring: Keyring | None = None, made_from: str = "source 1") -> None:
    found = digests(folder.parent)
    check_signed_folder(folder, made_from, Keyring(MINE) if keyring is None else keyring, found)
    found.keep(MINE)


def test_a_signed_folder_is_accepted_repeatedly(folder: Path) -> None:
    check(folder)
    check(folder)


def test_a_folder_that_is_not_there_is_no_forgery(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check(tmp_path / "none")


def test_one_trusted_signature_of_several_suffices(folder: Path) -> None:
    sign_folder(folder, "source 1", [MINE, THEIRS], digests(folder.parent))
    check(folder, Keyring(THEIRS))


def flip(file: Path) -> None:
    """A bit, with the time set back."""
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def rewrite(folder: Path, change: Callable[[dict[str, object]], object], key: SharedKey | None = None) -> None:
    document = parse_canonical((folder / LIST).read_bytes())
    change(document["files"])
    if key is not None:
        document["signatures"] = [key.sign("folder", canonical_json(document["files"]))]
    (folder / LIST).write_bytes(canonical_json(document))


def become_a_link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def move_folder(folder: Path) -> None:
    folder.rename(folder.with_name("real"))
    folder.symlink_to(folder.with_name("real"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda folder: flip(folder / "weights"), "weights has other bytes"),
    "a longer file": (lambda folder: (folder / "weights").open("ab").write(b"x"), "weights has other bytes"),
    "a file more": (lambda folder: (folder / "modeling.py").write_text("x"), "modeling.py is not in the list"),
    "a file less": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "no list": (lambda folder: (folder / LIST).unlink(), "no key has signed it"),
    "a list that is a link": (lambda folder: become_a_link(folder / LIST), "cannot be read"),
    "a list that is no JSON": (lambda folder: (folder / LIST).write_text("{"), "cannot be read"),
    "a list that is a list": (lambda folder: (folder / LIST).write_text("[]"), "none of ours"),
    "no signatures": (lambda folder: (folder / LIST).write_text('{"files":{},"signatures":7}'), "not signed"),
    "a flipped digest": (lambda folder: rewrite(folder, lambda files: files.update(made_from="x")), "does not fit"),
    "another's list": (lambda folder: rewrite(folder, lambda files: None, THEIRS), "a key that you hold"),
    "another version": (lambda folder: rewrite(folder, lambda files: files.update(format=2), MINE), "another version"),
    "no digest": (lambda folder: rewrite(folder, lambda files: files.update(files={"a": 1}), MINE), "no sha256"),
    "a path": (
        lambda folder: rewrite(folder, lambda f: f.update(files={"../x": {"digest": "0" * 64, "size": 0}}), MINE),
        "not in the list|missing",
    ),
    "an open folder": (lambda folder: folder.chmod(0o777), "others can put code there"),
    "an open file": (lambda folder: (folder / "weights").chmod(0o666), "others can write to weights"),
    "a file that is a link": (lambda folder: become_a_link(folder / "weights"), "weights is not a regular file"),
    "a folder that is a link": (move_folder, "is a symbolic link"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("was_known", [False, True], ids=["hashed", "known"])
def test_anything_else_is_refused(folder: Path, damage: str, was_known: bool) -> None:
    if was_known:
        check(folder)
    break_it, why = DAMAGE[damage]
    break_it(folder)
    with pytest.raises(SignedFolderError, match=why):
        check(folder)


def test_what_was_made_from_something_else_is_refused(folder: Path) -> None:
    with pytest.raises(SignedFolderError, match=re.escape("made from something else")):
        check(folder, made_from="source 2")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_another_users_folder_and_file_are_refused(folder: Path) -> None:
    os.chown(folder / "weights", 60001, 60001)
    with pytest.raises(SignedFolderError, match="others can write to weights"):
        check(folder)
    os.chown(folder, 60001, 60001)
    with pytest.raises(SignedFolderError, match="belongs to user 60001"):
        check(folder)
