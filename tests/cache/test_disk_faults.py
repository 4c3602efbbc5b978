"""A disk that is full, failing or read-only at any one call, or from any call on: the run goes on, with one warning."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.store.entry_file import MissReason
from piecegraph.cache.store.single_flight import Patience, single_flight
from piecegraph.cache.store.store import Loaded, Miss, NotSaved, Saved, Store
from piecegraph.cache.upkeep.archive import export_archive, import_archive
from piecegraph.cache.upkeep.collect import collect
from piecegraph.errors import CacheError
from tests.cache.cache_roots import BLOBS, NOW, a_store, an_entry, loads, saved

WRITING = ("open", "write", "fsync", "rename", "mkdir", "link", "unlink", "utime", "close", "chmod", "fchmod")
READING = (*WRITING, "read", "fstat", "lstat", "stat")
NEW = {"plan": b"new", "piece/0": b"code" * 50}


@dataclass
class Fault:
    """The `at`th call raises; so do all later ones, if it `stays`."""

    at: int
    number: int
    stays: bool
    calls: int = 0

    @property
    def came(self) -> bool:
        return self.calls > self.at

    def check(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.at or (self.stays and self.came):
            raise OSError(self.number, os.strerror(self.number))


@contextmanager
def failing(fault: Fault, names: tuple[str, ...]) -> Iterator[None]:
    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "close":  # the descriptor is gone, whatever it says
                real(*args)
            fault.check()
            return None if name == "close" else real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        for name in names:
            patch.setattr(os, name, faulty(name, getattr(os, name)))
        yield


FAULTS = [
    pytest.param(number, stays, id=f"{errno.errorcode[number]}{' from then on' if stays else ''}")
    for number, stays in ((errno.ENOSPC, True), (errno.EIO, False), (errno.EIO, True))
]


def each_fault(number: int, stays: bool) -> Iterator[Fault]:
    """At the first call, the second, ... until it never came."""
    for at in itertools.count():
        fault = Fault(at, number, stays)
        yield fault
        if not fault.came:
            assert at > 5, "nothing was called"
            return


@pytest.mark.parametrize(("number", "stays"), FAULTS)
@pytest.mark.parametrize("is_first", [True, False], ids=["first save", "later save"])
def test_a_save_on_a_failing_disk_costs_one_warning_and_no_other_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int, stays: bool, is_first: bool
) -> None:
    other = None if is_first else saved(a_store(tmp_path))
    for fault in each_fault(number, stays):
        folder = tmp_path / str(fault.at) if is_first else tmp_path
        store = a_store(folder)
        entry = an_entry(NEW, number=fault.at)
        caplog.clear()
        with failing(fault, WRITING), caplog.at_level(logging.WARNING):
            done = [store.save(entry, NEW)]
            if fault.came:
                done += [store.save(entry, NEW) for _ in range(2)]
        if NotSaved in map(type, done):
            (warning,) = caplog.records
            assert os.strerror(number) in warning.getMessage()
        elif not fault.came:
            assert not caplog.records
        assert stays or isinstance(done[-1], Saved), "the next one works"
        found = a_store(folder).verify(entry.key)
        assert not isinstance(found, Miss) or found.reason in (MissReason.ABSENT, MissReason.UNTRUSTED)
        assert isinstance(found, Loaded) or not any(isinstance(each, Saved) for each in done)
        assert other is None or loads(a_store(folder), other)
        assert isinstance(store.save(entry, NEW), Saved), "the disk is well again"
        assert loads(store, entry, NEW)
        collect(store.layout, now=NOW * 2)
        assert not list(store.layout.temp.iterdir())
        assert not list(store.layout.quarantine.iterdir())


@pytest.mark.parametrize(("number", "stays"), FAULTS)
@pytest.mark.parametrize("names", [READING, WRITING], ids=["all", "writes"])
def test_a_load_on_a_failing_disk_is_right_or_a_miss_and_throws_nothing_away(
    tmp_path: Path, number: int, stays: bool, names: tuple[str, ...]
) -> None:
    """A file that cannot be read now may be readable tomorrow."""
    entry = saved(a_store(tmp_path))
    for fault in each_fault(number, stays):
        store = a_store(tmp_path)
        with failing(fault, names):
            found = store.load(entry.key)
        assert isinstance(found, Loaded) or found.reason is MissReason.UNREADABLE
        assert not isinstance(found, Loaded) or found.blobs == BLOBS
        assert loads(store, entry)


@pytest.mark.parametrize(("number", "stays"), FAULTS)
def test_bad_bytes_on_a_failing_disk_are_a_miss(tmp_path: Path, number: int, stays: bool) -> None:
    """Quarantine and counting fail as quietly."""
    for fault in each_fault(number, stays):
        store = a_store(tmp_path / str(fault.at))
        entry = saved(store)
        store.layout.blob(entry.blobs["plan"].digest).write_bytes(b"?")
        with failing(fault, WRITING):
            found = store.load(entry.key)
        assert isinstance(found, Miss)
        assert isinstance(store.save(entry, BLOBS), Saved)
        assert loads(store, entry)


@pytest.mark.parametrize(("number", "stays"), FAULTS)
def test_waiting_for_a_lock_on_a_failing_disk_is_no_error(tmp_path: Path, number: int, stays: bool) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    came = []
    for at in range(12):
        fault = Fault(at, number, stays)
        with failing(fault, READING), single_flight(store.layout, entry.key, Patience(timeout_s=0)) as flight:
            assert flight.held or flight.reason
        came.append(fault.came)
        with single_flight(store.layout, entry.key, Patience(timeout_s=0)) as flight:
            assert flight.held
    assert came[0]
    assert not came[-1]


@pytest.mark.parametrize(("number", "stays"), FAULTS)
def test_archives_on_a_failing_disk_are_the_old_or_the_new(tmp_path: Path, number: int, stays: bool) -> None:
    store = a_store(tmp_path)
    old, new = saved(store, number=1), saved(store, number=2)
    file = tmp_path / "file"
    for fault in each_fault(number, stays):
        export_archive(store, file, [old.key])
        with failing(fault, READING):
            try:
                export_archive(store, file, [new.key])
            except (OSError, CacheError):
                assert fault.came
        target = Store.open(tmp_path / f"to {fault.at}", key_file=tmp_path / "user" / "cache.key")
        imported = import_archive(target, file)
        assert imported.keys in ((old.key,), (new.key,))
        assert target.exists(imported.keys[0])
