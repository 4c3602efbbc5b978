"""A converted model is read again if all of it is as it was signed, and converted again if not."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.disk.layout import default_key_file
from piecegraph.cache.store.signed_folder import LIST
from piecegraph.cache.trust.key_files import create_key_pair
from piecegraph.runner.models.converted_model import Conversion, converted_model


class Model:
    """A source that "converts" to two small files, and how often it was."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "model.gguf"
        self.source.write_bytes(b"weights")
        self.conversions = 0

    def convert(self, folder: Path) -> None:
        self.conversions += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(self.source.read_bytes() * 100)

    def start(self, at: Path | None = None) -> Path:
        """The folder, whose content is right."""
        folder = converted_model(Conversion(name="Tiny", source=self.source, format=1, convert=self.convert))
        assert (folder / "model.safetensors").read_bytes() == self.source.read_bytes() * 100
        assert {path.name for path in folder.iterdir()} - {LIST} == {"config.json", "model.safetensors"}
        assert at is None or folder == at
        return folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return Model(tmp_path)


def test_a_model_is_converted_once_and_hashed_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the source nor what it became is read by later starts to be hashed."""
    folder = model.start()
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    hashed: list[object] = []
    really = hashlib.file_digest

    def noted(*args: Any) -> Any:
        hashed.append(args)
        return really(*args)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    model.start(folder)
    assert (model.conversions, hashed) == (1, [])


def test_a_copied_cache_is_hashed_again_and_taken(model: Model, tmp_path: Path) -> None:
    folder = model.start()
    copy = tmp_path / "copy"
    folder.rename(copy)
    folder.mkdir(mode=0o700)
    for file in copy.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
        (folder / file.name).chmod(0o600)
    model.start(folder)
    assert model.conversions == 1


def flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    status = file.stat()
    file.write_bytes(b"W" + file.read_bytes()[1:])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def plant(folder: Path) -> None:
    """A folder without a signature, where ours would be."""
    folder.rename(folder.with_name("ours"))
    folder.mkdir()
    (folder / "config.json").write_text('{"auto_map": "evil"}')
    (folder / "model.safetensors").write_bytes(b"theirs")


def plant_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("ours"))
    folder.symlink_to(folder.with_name("ours"))


def plant_a_file(folder: Path) -> None:
    folder.rename(folder.with_name("ours"))
    folder.write_text("a file")


ATTACKS: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "a planted folder": plant,
    "a link": plant_a_link,
    "a file": plant_a_file,
    "an open folder": lambda folder: folder.chmod(0o777),
    "an open file": lambda folder: (folder / "config.json").chmod(0o666),
    "another file": lambda folder: (folder / "adapter_model.bin").write_bytes(b"pickle"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_folder_that_differs_from_its_signature_is_converted_again(
    model: Model, caplog: pytest.LogCaptureFixture, attack: str
) -> None:
    folder = model.start()
    ATTACKS[attack](folder)
    model.start(folder)
    assert model.conversions == 2
    assert "is not used (" in caplog.text
    model.start(folder)
    assert model.conversions == 2
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_a_folder_planted_before_the_first_start_is_not_used(model: Model) -> None:
    folder = model.start()
    for file in (default_key_file(), default_key_file().with_name("digests.json"), folder / LIST):
        file.unlink()
    flip(folder)
    model.start(folder)
    assert model.conversions == 2


@pytest.mark.parametrize("which", ["root", "models"])
def test_a_folder_that_others_can_write_to_is_not_used(
    model: Model, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    """Its entries can be exchanged while they are read."""
    kept = model.start()
    opened = kept.parent if which == "models" else kept.parent.parent
    opened.chmod(0o777)
    for number in (2, 3):
        folder = model.start()
        assert kept.parent not in folder.parents
        assert model.conversions == number
    assert f"chmod go-w {opened}" in caplog.text
    opened.chmod(0o700)
    model.start(kept)


def test_a_key_that_others_can_read_signs_nothing(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    kept = model.start()
    default_key_file().chmod(0o644)
    assert model.start() != kept
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("what", ["a folder", "a link"])
def test_a_lock_file_that_cannot_be_made_is_not_an_error(model: Model, what: str) -> None:
    folder = model.start()
    flip(folder)
    lock = folder.with_name(f"{folder.name}.lock")
    lock.unlink(missing_ok=True)
    if what == "a folder":
        lock.mkdir()
    else:
        lock.symlink_to("elsewhere")
    assert model.start() != folder


def test_without_a_key_a_model_is_converted_for_the_process_alone(model: Model, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    folder = model.start()
    assert tmp_path / "cache" not in folder.parents
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
@pytest.mark.parametrize("is_signed", [True, False])
def test_another_users_copy_is_read_if_a_configured_key_has_signed_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_signed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An image that somebody has filled; the key that signs is not in it."""
    public = create_key_pair(tmp_path / "image.key")
    if is_signed:
        monkeypatch.setenv("PIECEGRAPH_SIGNING_KEY_FILE", str(tmp_path / "image.key"))
    kept = model.start()
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        os.chown(path, 60001, 60001)
    assert (stat.S_IMODE((kept / "config.json").stat().st_mode) == 0o644) == is_signed
    monkeypatch.setenv("PIECEGRAPH_SIGNING_KEY_FILE", str(public))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "other"))
    with caplog.at_level(logging.WARNING):
        folder = model.start()
    assert (folder == kept) == is_signed
    assert (model.conversions == 1) == is_signed
    assert ("belongs to another user and has no good copy" in caplog.text) == (not is_signed)
