"""The collector rests while a start makes what stays, and is as before afterwards."""

from __future__ import annotations

import gc
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


def test_collections_are_off_inside_and_on_after() -> None:
    def fail() -> None:
        with paused_gc():
            with paused_gc():
                assert not gc.isenabled()
            assert not gc.isenabled(), "the block around is not over"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_made_inside_count_as_old() -> None:
    """The next collection of young objects visits few; a full collection finds garbage among the old."""

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
def test_objects_that_the_program_froze_stay_frozen(
    monkeypatch: pytest.MonkeyPatch, num_frozen: int, is_thawed: bool
) -> None:
    """It has when it begins, in 3.12, where each start then ended with a walk over all that it had made."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: num_frozen)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with paused_gc():
        pass
    assert calls == (["freeze", "unfreeze"] if is_thawed else [])
