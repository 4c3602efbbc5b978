"""A disk that forgets what was not synced: all that may lie there after a power cut at some call of a writer.

The model promises less than any file system does. The bytes of a file are safe once it was synced; until then it may
hold all, some or none of them, or zeros. A name that was made, moved or removed is safe once its folder was synced;
until then it may be so or not, whatever became of names changed before or after. A rename happens whole or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Tree = Mapping[str, bytes | None]
"""The content of a folder by relative path; None is a folder."""


class Killed(BaseException):
    """The writer is dead: from here on every call of it on files raises this."""


@dataclass(frozen=True)
class Written:
    """Bytes at the end of a file."""

    file: int
    data: bytes


@dataclass(frozen=True)
class FileSynced:
    file: int


@dataclass(frozen=True)
class Renamed:
    """Names that changed in one step: to a file, to a folder (0), or to nothing (None). Safe by a sync of `folder`."""

    folder: str
    names: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class FolderSynced:
    folder: str


Step = Written | FileSynced | Renamed | FolderSynced
FOLDER = 0


@dataclass
class Recorder:
    """Carries out a writer's calls on files below `root`, and keeps what each means to the disk."""

    root: Path
    kill_at: int | None = None  # the call at which the writer is killed
    calls: int = 0
    steps: list[Step] = field(default_factory=list)
    _files: dict[str, int] = field(default_factory=dict)
    _open: dict[int, int | str] = field(default_factory=dict)  # by descriptor: a file, or the path of a folder
    _serial: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def begin(self) -> None:
        """Take what lies there as safe."""
        for name, data in tree_of(self.root).items():
            self._change((name, FOLDER if data is None else self._new_file(name)))
            if data is not None:
                self.steps += [Written(self._files[name], data), FileSynced(self._files[name])]
        self.steps += [FolderSynced(folder) for folder in {str(Path(name).parent) for name in tree_of(self.root)}]

    def go_on_from(self, other: Recorder) -> None:
        """Another writer comes after `other`; nothing was synced between."""
        self.steps, self._files, self._serial = other.steps, other._files, other._serial

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Until the body ends, or the writer is killed: then it ends there."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "close", "write", "fsync", "rename", "unlink", "link", "mkdir", "utime", "fchmod"):
                patch.setattr(os, name, self._counted(getattr(os, name), getattr(self, f"_after_{name}")))
            with contextlib.suppress(Killed):
                yield
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _counted(self, real: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.kill_at is not None and self.calls >= self.kill_at:
                raise Killed
            self.calls += 1
            result = real(*args, **options)
            note(result, *args)
            return result

        return call

    def _name(self, path: Any) -> str | None:
        path = Path(path)
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else None

    def _new_file(self, name: str) -> int:
        self._files[name] = next(self._serial)
        return self._files[name]

    def _change(self, *names: tuple[str, int | None]) -> None:
        self.steps.append(Renamed(str(Path(names[-1][0]).parent), names))

    def _after_open(self, descriptor: int, path: Any, flags: int, *_: Any) -> None:
        name = self._name(path)
        if name is None:
            return
        if flags & os.O_DIRECTORY:
            self._open[descriptor] = name
            return
        if name not in self._files:
            self._change((name, self._new_file(name)))
        self._open[descriptor] = self._files[name]

    def _after_close(self, _: None, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def _after_write(self, count: int, descriptor: int, data: Any) -> None:
        file = self._open.get(descriptor)
        if isinstance(file, int):
            self.steps.append(Written(file, bytes(data[:count])))

    def _after_fsync(self, _: None, descriptor: int) -> None:
        what = self._open.get(descriptor)
        if isinstance(what, int):
            self.steps.append(FileSynced(what))
        elif what is not None:
            self.steps.append(FolderSynced(what))

    def _after_rename(self, _: None, source: Any, target: Any) -> None:
        old, new = self._name(source), self._name(target)
        assert old is not None
        assert new is not None
        self._files[new] = self._files.pop(old)
        self._change((old, None), (new, self._files[new]))

    def _after_link(self, _: None, source: Any, target: Any) -> None:
        old, new = self._name(source), self._name(target)
        assert old is not None
        assert new is not None
        self._files[new] = self._files[old]
        self._change((new, self._files[new]))

    def _after_unlink(self, _: None, path: Any, *__: Any) -> None:
        name = self._name(path)
        assert name is not None
        self._files.pop(name, None)
        self._change((name, None))

    def _after_mkdir(self, _: None, path: Any, *__: Any) -> None:
        name = self._name(path)
        if name is not None:
            self._change((name, FOLDER))

    def _after_utime(self, *_: Any) -> None:
        """Times may be lost; nothing depends on them but the order of collection."""

    def _after_fchmod(self, *_: Any) -> None:
        """Modes are not part of the model."""


def tree_of(root: Path) -> dict[str, bytes | None]:
    """Return the real content, parents first."""
    paths = sorted(root.rglob("*"))
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths}


def after_power_cut(steps: Sequence[Step], chance: random.Random, samples: int = 8) -> Iterator[Tree]:
    """Yield the states that a power cut may leave of `steps`: the least, the most with each state of the bytes, and
    samples."""
    yield _left(steps, lambda: False, lambda data: b"")
    fates = (_all, _none, _half, _zeros)
    for fate in fates:
        yield _left(steps, lambda: True, fate)
    for _ in range(samples):
        yield _left(steps, lambda: chance.random() < 0.5, lambda data: chance.choice(fates)(data))


def _all(data: bytes) -> bytes:
    return data


def _none(data: bytes) -> bytes:
    return b""


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _zeros(data: bytes) -> bytes:
    return bytes(len(data))


def _left(steps: Sequence[Step], is_kept: Callable[[], bool], fate: Callable[[bytes], bytes]) -> Tree:
    safe: dict[int, bytes] = {}
    pending: dict[int, bytes] = {}
    names: dict[str, int | None] = {}
    synced_at = {step.folder: at for at, step in enumerate(steps) if isinstance(step, FolderSynced)}
    for at, step in enumerate(steps):
        if isinstance(step, Written):
            pending[step.file] = pending.get(step.file, b"") + step.data
        elif isinstance(step, FileSynced):
            safe[step.file] = safe.get(step.file, b"") + pending.pop(step.file, b"")
        elif isinstance(step, Renamed) and (synced_at.get(step.folder, -1) > at or is_kept()):
            names.update(step.names)
    tree: dict[str, bytes | None] = {}
    for name in sorted(names):
        file = names[name]
        parent = str(Path(name).parent)
        if file is None or (parent != "." and tree.get(parent, b"") is not None):
            continue  # removed, or its folder was never there
        tree[name] = None if file == FOLDER else safe.get(file, b"") + fate(pending.get(file, b""))
    return tree


def lay_out(tree: Tree, folder: Path) -> Path:
    """Make `folder` with `tree` in it, for its owner alone."""
    folder.mkdir(mode=0o700)
    for name, data in tree.items():
        if data is None:
            (folder / name).mkdir(mode=0o700)
        else:
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o600)
    return folder
