"""The collector rests while a start makes what stays, and is as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

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
    with paused_gc():
        many: list[list[object]] = [[] for _ in range(20_000)]
        circle: list[object] = []
        circle.append(circle)
        del circle
    assert gc.get_count()[0] < 1000 and gc.get_freeze_count() == 0
    assert gc.collect() >= 1
    assert len(many) == 20_000


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused_gc():
        kept: list[list[int]] = [[] for _ in range(100)]
    assert gc.get_freeze_count() == frozen > 0 and kept
