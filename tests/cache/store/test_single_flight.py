"""One compiles, the others wait; and nobody waits for the dead, or for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from piecegraph.cache.disk.layout import Layout
from piecegraph.cache.store.single_flight import Flight, Flights, Patience, single_flight, sweep_locks
from piecegraph.cache.store.store import Loaded
from tests.cache.cache_roots import a_store, an_entry, loads, saved, start

# Later Pythons warn where other tests have left threads; the children here run our own Python only, and exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    store = a_store(tmp_path)
    saved(store)
    return store.layout


def test_a_free_lock_is_acquired_at_once_and_repeatedly(layout: Layout) -> None:
    for _ in range(2):
        with single_flight(layout, KEY, Patience(timeout_s=0)) as flight:
            assert flight == Flight(held=True, waited_s=0.0)
            with single_flight(layout, OTHER, Patience(timeout_s=0)) as other:
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

    with single_flight(layout, KEY, Patience(timeout_s=9, poll_s=1, clock=lambda: now[0], sleep=sleep)) as flight:
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
        with single_flight(layout, KEY, Patience(timeout_s=0)) as second:
            assert not second.held


def test_a_lock_whose_file_was_replaced_removes_nobody_elses(layout: Layout) -> None:
    """The cache was cleared while it was held, and another process has begun."""
    first = single_flight(layout, KEY)
    first.__enter__()
    layout.lock(KEY).unlink()
    with single_flight(layout, KEY, Patience(timeout_s=0)) as second:
        assert second.held
        first.__exit__(None, None, None)
        assert layout.lock(KEY).exists()


def slept_away(timeout_s: float, poll_s: float = 0.25, **options: float) -> Patience:
    """Return the patience of a caller whose clock advances only while it sleeps, however busy the machine is."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return Patience(timeout_s=timeout_s, poll_s=poll_s, clock=lambda: now[0], sleep=sleep, **options)


def test_a_wait_ends_and_the_caller_compiles(layout: Layout) -> None:
    with single_flight(layout, KEY), single_flight(layout, KEY, slept_away(5, poll_s=1)) as flight:
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
    with single_flight(layout, KEY, Patience(timeout_s=0)) as flight:
        assert not flight.held
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with single_flight(layout, KEY, Patience(timeout_s=0)) as flight:
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
    with single_flight(layout, KEY, Patience(timeout_s=0)) as flight:
        assert flight.held


def test_a_lock_file_that_was_removed_meanwhile_is_not_held(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two processes would hold a lock: one of the removed file, one of the new file."""
    import fcntl

    really_flock = fcntl.flock

    def then_removed(fd: int, operation: int) -> None:
        really_flock(fd, operation)
        monkeypatch.setattr(fcntl, "flock", really_flock)
        layout.lock(KEY).unlink()

    monkeypatch.setattr(fcntl, "flock", then_removed)
    with single_flight(layout, KEY, Patience(poll_s=0.001)) as flight:
        assert flight.held
        with single_flight(layout, KEY, Patience(timeout_s=0)) as second:
            assert not second.held


def load_or_compile(folder: Path) -> None:
    """Run as one rank. A compile is a line in a file, and takes a while."""
    store = a_store(folder)
    entry = an_entry()
    if not isinstance(store.load(entry.key), Loaded):
        assert store.prepare()
        with single_flight(store.layout, entry.key, Patience(poll_s=0.002)) as flight:
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


def held_by_another(layout: Layout, beat_s: float = 0.02) -> tuple[int, Callable[[], None]]:
    """A process that holds the lock of `KEY` and gives signs of life, and what ends it."""
    ready, tell = os.pipe()

    def hold() -> None:
        with single_flight(layout, KEY, Patience(beat_s=beat_s)) as flight:
            os.write(tell, b"y" if flight.held else b"n")
            signal.pause()

    pid = start(hold)
    assert os.read(ready, 1) == b"y"

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(tell)

    return pid, end


def test_a_stopped_process_is_named_and_then_not_waited_for(layout: Layout) -> None:
    """Really stopped: it holds its lock, and touches it no more. Another that waits gets the lock that was given up."""
    pid, end = held_by_another(layout)
    os.kill(pid, signal.SIGSTOP)
    said: list[str] = []
    patience = Patience(named_after_s=0.1, silent_s=0.5, poll_s=0.01, timeout_s=30)
    try:
        with single_flight(layout, KEY, patience, said.append) as flight:
            assert flight.held
            assert flight.waited_s >= 0.5
            with single_flight(layout, KEY, Patience(timeout_s=0)) as second:
                assert not second.held, "one takes its place"
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
            assert layout.lock(KEY).exists(), "it removes nobody else's lock"
    finally:
        end()
    assert said[0] == f"waiting for process {pid} (stopped)"
    assert said[1].startswith(f"process {pid} (stopped) has given no sign of life for")
    assert len(said) == 2


def test_a_slow_process_that_lives_is_waited_for(layout: Layout) -> None:
    """A second passes with each sign of life: it is given up when the time is over, and not because it is silent."""
    pid, end = held_by_another(layout)
    now, said = [0.0], list[str]()

    def sleep(seconds: float) -> None:
        before = layout.lock(KEY).stat().st_mtime_ns
        for _ in range(60_000):
            if layout.lock(KEY).stat().st_mtime_ns != before:
                break
            time.sleep(0.001)
        now[0] += seconds

    patience = Patience(named_after_s=1, silent_s=1.5, poll_s=1, timeout_s=6, clock=lambda: now[0], sleep=sleep)
    try:
        with single_flight(layout, KEY, patience, said.append) as flight:
            assert not flight.held
    finally:
        end()
    assert said == [f"waiting for process {pid}"]


def test_a_short_wait_is_not_reported(layout: Layout) -> None:
    said: list[str] = []
    with single_flight(layout, KEY), single_flight(layout, KEY, slept_away(1.9), said.append) as flight:
        assert not flight.held and flight.waited_s >= 1.9
    assert said == []


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"", "another process"),
        (b"\xff\xfe", "another process"),
        (b"x" * 10_000, "another process"),
        (b"12 34 56", "another process"),
        (b"1" * 250 + b" here", f"process {'1' * 250} on here"),
        (b"17 elsewhere", "process 17 on elsewhere"),
        (b"17 \x1b[2J", "process 17"),
    ],
)
def test_whatever_a_locks_file_says_is_no_error(layout: Layout, content: bytes, name: str) -> None:
    said: list[str] = []
    with single_flight(layout, KEY):
        layout.lock(KEY).write_bytes(content)
        with single_flight(layout, KEY, slept_away(0.5, named_after_s=0), said.append) as second:
            assert not second.held
    assert said == [f"waiting for {name}"]


def test_several_keys_are_held_and_let_go_of(layout: Layout) -> None:
    mine, theirs = Flights(layout, Patience(timeout_s=0)), Flights(layout, Patience(timeout_s=0))
    assert mine.take(KEY)
    assert mine.take(KEY)
    assert mine.take(OTHER)
    assert not theirs.take(KEY)
    mine.release(KEY)
    mine.release(KEY)
    assert theirs.take(KEY)
    assert not mine.take(KEY)
    mine.close()
    theirs.close()
    assert list(layout.locks.iterdir()) == []


def test_a_waiting_process_holds_no_lock(layout: Layout) -> None:
    """Two that hold what the other waits for would wait for ever."""
    mine, theirs = Flights(layout, Patience(timeout_s=0)), Flights(layout, Patience(timeout_s=0))
    assert mine.take(KEY)
    assert theirs.take(OTHER)
    flight = mine.wait(OTHER)
    assert not flight.held
    assert theirs.take(KEY)
    assert mine.take(OTHER), "it is compiled without a lock, and not waited for again"
    mine.close()
    theirs.close()


def test_without_a_folder_all_is_compiled(tmp_path: Path) -> None:
    flights = Flights(Layout(tmp_path))
    assert flights.take(KEY)
    assert not flights.wait(KEY).held
    flights.close()
