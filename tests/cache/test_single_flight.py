"""One compiles, the others wait; and nobody waits for the dead, or for ever."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from piecegraph.cache.layout import Layout
from piecegraph.cache.single_flight import Flight, single_flight, sweep_locks
from piecegraph.cache.store import Loaded
from tests.cache.cache_roots import a_store, an_entry, loads, saved, start

# Later Pythons warn where other tests have left threads; the children here run our own Python only, and exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    store = a_store(tmp_path)
    saved(store)
    return store.layout


def test_a_free_lock_is_had_at_once_and_again(layout: Layout) -> None:
    for _ in range(2):
        with single_flight(layout, KEY, timeout_s=0) as flight:
            assert flight == Flight(held=True, waited_s=0.0)
            with single_flight(layout, OTHER, timeout_s=0) as other:
                assert other.held


def test_a_second_one_waits_until_the_first_is_done(layout: Layout) -> None:
    """Time passes only where it is slept away, and after three sleeps the first is done."""
    now = [0.0]
    first = single_flight(layout, KEY)
    first.__enter__()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 3:
            first.__exit__(None, None, None)

    with single_flight(layout, KEY, timeout_s=9, poll_s=1, clock=lambda: now[0], sleep=sleep) as flight:
        assert flight == Flight(held=True, waited_s=3.0)


def test_nothing_is_left_of_a_lock(layout: Layout) -> None:
    with single_flight(layout, KEY):
        assert [path.name for path in layout.locks.iterdir()] == [layout.lock(KEY).name]
    assert list(layout.locks.iterdir()) == []


def test_locks_of_the_dead_are_swept_and_those_that_are_held_stay(layout: Layout) -> None:
    layout.lock(OTHER).touch()
    with single_flight(layout, KEY):
        assert sweep_locks(layout) == 1
        assert list(layout.locks.iterdir()) == [layout.lock(KEY)]
        with single_flight(layout, KEY, timeout_s=0) as second:
            assert not second.held


def test_a_lock_whose_file_was_replaced_removes_nobody_elses(layout: Layout) -> None:
    """The cache was cleared while it was held, and another process has begun."""
    first = single_flight(layout, KEY)
    first.__enter__()
    layout.lock(KEY).unlink()
    with single_flight(layout, KEY, timeout_s=0) as second:
        assert second.held
        first.__exit__(None, None, None)
        assert layout.lock(KEY).exists()


def test_a_wait_ends_and_the_caller_compiles(layout: Layout) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with (
        single_flight(layout, KEY),
        single_flight(layout, KEY, timeout_s=5, poll_s=1, clock=lambda: now[0], sleep=sleep) as flight,
    ):
        assert not flight.held
        assert flight.waited_s == 5.0
        assert "another process" in flight.reason


def test_the_lock_of_a_killed_process_is_free(layout: Layout) -> None:
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with single_flight(layout, KEY):
            os.write(tell, b"x")
            signal.pause()
    os.read(ready, 1)
    with single_flight(layout, KEY, timeout_s=0) as flight:
        assert not flight.held
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with single_flight(layout, KEY, timeout_s=0) as flight:
        assert flight.held
    os.close(ready)
    os.close(tell)


def test_no_folder_no_lock_and_no_error(tmp_path: Path) -> None:
    with single_flight(Layout(tmp_path), KEY) as flight:
        assert not flight.held
        assert "No such file" in flight.reason


def test_an_error_inside_frees_the_lock(layout: Layout) -> None:
    with pytest.raises(ZeroDivisionError), single_flight(layout, KEY):
        raise ZeroDivisionError
    with single_flight(layout, KEY, timeout_s=0) as flight:
        assert flight.held


def test_a_lock_file_that_was_removed_meanwhile_is_not_held(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two would hold "the" lock: one of the file that is gone, one of the new one."""
    import fcntl

    really_flock = fcntl.flock

    def then_removed(fd: int, operation: int) -> None:
        really_flock(fd, operation)
        monkeypatch.setattr(fcntl, "flock", really_flock)
        layout.lock(KEY).unlink()

    monkeypatch.setattr(fcntl, "flock", then_removed)
    with single_flight(layout, KEY, poll_s=0.001) as flight:
        assert flight.held
        with single_flight(layout, KEY, timeout_s=0) as second:
            assert not second.held


def load_or_compile(folder: Path) -> None:
    """What a rank does. A compile is a line in a file, and takes a while."""
    store = a_store(folder)
    entry = an_entry()
    if not isinstance(store.load(entry.key), Loaded):
        assert store.prepare()
        with single_flight(store.layout, entry.key, poll_s=0.002) as flight:
            if not flight.held or not isinstance(store.load(entry.key), Loaded):
                with (folder / "compiles").open("a") as compiles:
                    compiles.write("x\n")
                time.sleep(0.1)
                saved(store)
    assert loads(store, entry)


@pytest.mark.parametrize("is_new", [True, False], ids=["no cache yet", "a cache"])
def test_of_sixteen_on_a_cold_key_one_compiles(tmp_path: Path, is_new: bool) -> None:
    """Each loads again once it has the lock, and all have the very same."""
    if not is_new:
        saved(a_store(tmp_path), number=0)
    pids = [start(partial(load_or_compile, tmp_path)) for _ in range(16)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 16
    assert (tmp_path / "compiles").read_text() == "x\n"


def test_of_sixteen_whose_compiler_is_killed_another_compiles(tmp_path: Path) -> None:
    """Nobody waits for the dead, and still one at a time."""
    begun, begin = os.pipe()

    def compile_for_ever() -> None:
        store = a_store(tmp_path)
        assert store.prepare()
        with single_flight(store.layout, an_entry().key) as flight:
            os.write(begin, b"y" if flight.held else b"n")
            signal.pause()

    holder = start(compile_for_ever)
    assert os.read(begun, 1) == b"y"
    pids = [start(partial(load_or_compile, tmp_path)) for _ in range(15)]
    time.sleep(0.1)  # some wait by now; whoever comes later finds the lock free, or the entry
    assert not (tmp_path / "compiles").exists()
    os.kill(holder, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(holder, 0)[1]) == -signal.SIGKILL
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 15
    assert (tmp_path / "compiles").read_text() == "x\n"
    os.close(begun)
    os.close(begin)
