"""A load ends as soon as another rank does, in a wait, in Python code or behind an import, and leaves nothing."""

from __future__ import annotations

import contextlib
import importlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from piecegraph.runner.distributed.child_process import Child
from piecegraph.runner.distributed.loading_watch import SIGNAL, RankLost, ended_by_loss

HANG_S = 120.0


@dataclass(frozen=True, slots=True)
class Started(Child):
    """A process that does nothing, and the other end of its channel."""

    other_end: Connection


@pytest.fixture
def rank() -> Iterator[Started]:
    """A rank whose channel outlives its process, so that each of the two has to be watched."""
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with ours, theirs:
        yield Started("rank", 1, process, ours, theirs)
        process.kill()
        process.wait()


def kill_soon(child: Child) -> None:
    """Kill the process once the caller is in its wait."""
    threading.Timer(0.1, child.process.kill).start()


def test_a_wait_without_end_ends_with_the_rank(rank: Started) -> None:
    lost = threading.Event()
    kill_soon(rank)
    with pytest.raises(RankLost), ended_by_loss([rank], lambda is_over: lost.set(), HANG_S):
        queue.SimpleQueue[int]().get(timeout=HANG_S)
    assert lost.wait(HANG_S)
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL


def test_python_code_ends_with_the_rank_and_no_handler_for_exceptions_keeps_it(rank: Started) -> None:
    kill_soon(rank)
    deadline = time.monotonic() + HANG_S

    def busy() -> None:
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(RankLost), ended_by_loss([rank], lambda is_over: None, HANG_S):
        busy()


def test_what_a_rank_says_ends_a_load_too(rank: Started) -> None:
    rank.other_end.send(("failed", "planted"))
    with pytest.raises(RankLost), ended_by_loss([rank], lambda is_over: None, HANG_S):
        time.sleep(HANG_S)
    assert rank.channel.recv() == ("failed", "planted")  # for whoever says why


def test_a_rank_may_answer_a_call_and_is_lost_when_it_ends(rank: Started) -> None:
    def call() -> None:
        rank.other_end.send(("result", 1))
        kill_soon(rank)
        time.sleep(HANG_S)

    with pytest.raises(RankLost), ended_by_loss([rank], lambda is_over: None, may_answer=True):
        call()
    assert rank.channel.recv() == ("result", 1)


def test_a_rank_that_is_stopped_for_too_long_is_lost(rank: Started) -> None:
    rank.process.send_signal(signal.SIGSTOP)  # type: ignore[attr-defined]  # of Popen
    with pytest.raises(RankLost), ended_by_loss([rank], lambda is_over: None, 0.2):
        time.sleep(HANG_S)
    assert rank.process.poll() is None


def test_an_import_is_finished_first(rank: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_while_lost.py").write_text(
        f"import os, time\nis_half = True\nos.kill({rank.process.pid}, 9)\n"
        "for _ in range(50):\n    time.sleep(0.01)\nis_half = False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def load() -> None:
        importlib.import_module("imported_while_lost")
        time.sleep(HANG_S)

    with pytest.raises(RankLost), ended_by_loss([rank], lambda is_over: None, HANG_S):
        load()
    assert sys.modules.pop("imported_while_lost").is_half is False


def test_a_load_that_ends_well_leaves_nothing(rank: Started) -> None:
    before = set(threading.enumerate())
    with ended_by_loss([rank], lambda is_over: pytest.fail("nothing was lost"), HANG_S):
        assert signal.getsignal(SIGNAL) is not signal.SIG_DFL
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL
    assert set(threading.enumerate()) <= before


def test_a_thread_and_a_program_with_the_signal_look_for_themselves(rank: Started) -> None:
    def load() -> None:
        with ended_by_loss([rank], lambda is_over: None, HANG_S):
            rank.process.kill()
            rank.process.wait()

    def own(*_: object) -> None:
        """Be the handler of a program."""

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    signal.signal(SIGNAL, own)
    try:
        load()
        assert signal.getsignal(SIGNAL) is own
    finally:
        signal.signal(SIGNAL, signal.SIG_DFL)
