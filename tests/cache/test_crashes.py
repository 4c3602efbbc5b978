"""Writers that are killed, and writers at the same time: at every system call of a save, each state is a legal one."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.store.store import Loaded
from piecegraph.cache.upkeep.collect import collect
from tests.cache.cache_roots import BLOBS, FULL, NOW, a_store, an_entry, loads, saved, start
from tests.cache.killed_saves import run_in_a_process_of_its_own

# Later Pythons warn where other tests have left threads; the children here run our own Python only, and exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

CALLS = ("open", "write", "fsync", "rename", "close", "mkdir", "utime", "link", "unlink")


def in_a_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked process and wait for it; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(start(body), 0)[1])


def kill_at(number: int) -> None:
    """Make this process die, as by kill -9, instead of its `number`th system call on files."""
    left = [number]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def save_and_die(folder: Path, number: int, blobs: dict[str, bytes]) -> None:
    kill_at(number)
    saved(a_store(folder), blobs)


@pytest.mark.slow
def test_a_writer_killed_at_any_call_loses_nothing_and_leaves_nothing_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the very first save, which makes folders and key; and what it leaves is swept."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and a kill loses nothing that was written
    for number in range(200):
        folder = tmp_path / str(number)
        status = in_a_child(partial(save_and_die, folder, number, BLOBS))
        store = a_store(folder)
        whole = isinstance(store.verify(an_entry().key), Loaded)
        if status == 0:
            assert whole
            break
        assert status == -signal.SIGKILL
        other = saved(store, eps=7.0)
        assert loads(store, other)
        collect(store.layout, now=NOW * 2)
        assert not list(store.layout.temp.iterdir())
        assert loads(store, other)
        assert isinstance(store.verify(an_entry().key), Loaded) == whole
    else:
        raise AssertionError("a save takes more calls than expected")
    assert number > 30


def test_a_writer_killed_while_it_replaces_an_entry_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    old = {"plan": b"old"}
    new = {"plan": b"new"}
    for number in range(0, 60, 3):
        saved(store, old)
        in_a_child(partial(save_and_die, tmp_path, number, new))
        found = store.load(an_entry(old).key)
        assert isinstance(found, Loaded)
        assert found.blobs in (old, new)


@pytest.mark.parametrize("kills", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_writers_killed_at_random_times_leave_only_legal_states(kills: int, tmp_path: Path) -> None:
    """No wrong byte is loaded, no other entry is lost, and what the dead left is swept."""
    outcome = run_in_a_process_of_its_own(tmp_path, kills=kills, seed=6)
    assert (outcome.wrong, outcome.lost, outcome.unswept) == (0, 0, 0) and outcome.killed >= kills, outcome
    assert min(outcome.half_written, outcome.orphans) > 0, "no kill was in the middle"


def test_processes_that_save_the_same_key_at_once_all_succeed(tmp_path: Path) -> None:
    """From nothing: folders, key, blobs and entry are all contended."""
    begin, go = os.pipe()

    def save() -> None:
        os.close(go)
        os.read(begin, 1)
        store = a_store(tmp_path)
        saved(store)
        assert loads(store, an_entry())

    pids = [start(save) for _ in range(8)]
    os.close(begin)
    os.close(go)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 8
    store = a_store(tmp_path)
    assert loads(store, an_entry())
    assert not list(store.layout.temp.iterdir())
    assert store.counters.read().saves == 8


def test_gc_beside_eight_readers_and_writers_never_makes_a_bad_load(tmp_path: Path) -> None:
    """A reader gets the very bytes or a miss; nothing goes to quarantine, nothing raises, and it all goes on."""
    num_rounds = 3000 if FULL else 60

    def work(seed: int) -> None:
        store, chance = a_store(tmp_path), random.Random(seed)
        os.fsync = lambda fd: None
        for _ in range(num_rounds):
            number = chance.randrange(6)
            blobs = {"plan": b"%d" % number * 1000, "shared": b"same" * 5000}
            if chance.random() < 0.3:
                saved(store, blobs, number=number)
            found = store.load(an_entry(blobs, number=number).key)
            assert not isinstance(found, Loaded) or found.blobs == blobs

    saved(a_store(tmp_path))
    running = {start(partial(work, seed)) for seed in range(8)}
    store = a_store(tmp_path)
    collections = removed = 0
    while running:
        fresh_s = (0.0, 600.0)[collections % 2]
        removed += len(collect(store.layout, now=time.time(), max_bytes=20_000, fresh_s=fresh_s).entries)
        collections += 1
        time.sleep(0.002)
        ended = {pid: status for pid, status in (os.waitpid(each, os.WNOHANG) for each in running) if pid}
        assert not any(ended.values()), ended
        running -= ended.keys()
    totals = store.counters.read()
    assert not list(store.layout.quarantine.iterdir())
    assert not list(store.layout.temp.iterdir())
    assert set(totals.misses) <= {"absent", "blob missing"}
    assert min(removed, totals.hits, totals.saves, totals.misses["absent"]) > 0, (removed, totals)
    saved(store, BLOBS)
    assert loads(store, an_entry())
