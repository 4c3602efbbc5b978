"""The collector rests while a start makes what stays, and is as before afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from piecegraph import paused_gc as paused_gc_module
from piecegraph.paused_gc import paused_gc


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """The tests' own set-up freezes what it has made."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_it_is_off_inside_and_on_after() -> None:
    def fail() -> None:
        with paused_gc():
            with paused_gc():
                assert not gc.isenabled()
            assert not gc.isenabled(), "the block around is not over"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.isenabled()


def test_who_has_it_off_has_it_off_after() -> None:
    gc.disable()
    try:
        with paused_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_made_is_old() -> None:
    """So the next collection of young objects walks over few; and garbage among them is found by a full one."""

    class Circle:
        itself: Circle

    with paused_gc():
        many: list[list[object]] = [[] for _ in range(20_000)]
        circle = Circle()
        circle.itself = circle
        is_there = weakref.ref(circle)
        del circle
    assert gc.get_count()[0] < 1000 and gc.get_freeze_count() == 0
    gc.collect(1)
    assert is_there() is not None
    gc.collect()
    assert is_there() is None and len(many) == 20_000


@pytest.mark.parametrize(("num_frozen", "is_thawed"), [(375, True), (paused_gc_module.FROZEN_BY_PYTHON, False)])
def test_what_python_froze_does_not_count(monkeypatch: pytest.MonkeyPatch, num_frozen: int, is_thawed: bool) -> None:
    """It has when it begins, in 3.12, where each start then ended with a walk over all that it had made."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: num_frozen)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with paused_gc():
        pass
    assert calls == (["freeze", "unfreeze"] if is_thawed else [])


def test_threads_that_overlap_are_one_pause() -> None:
    """Who began first does not end it for who is in the middle of something."""
    first_began, second_began, first_ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def first() -> None:
        with paused_gc():
            first_began.set()
            second_began.wait(10)
        first_ended.set()

    def second() -> None:
        first_began.wait(10)
        with paused_gc():
            second_began.set()
            first_ended.wait(10)
            seen.append(gc.isenabled())

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [False] and gc.isenabled()


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused_gc():
        kept: list[list[int]] = [[] for _ in range(100)]
    assert gc.get_freeze_count() == frozen > 0 and kept
