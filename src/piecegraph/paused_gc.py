"""Python's garbage collector, paused while very much is made that stays."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_BY_PYTHON = 2000
"""Python 3.12 begins with some hundreds of frozen objects. A program that freezes what it has made has many more."""


class _Pauses:
    """Of all threads together: the collector is the process's."""

    lock = threading.Lock()
    number = 0  # of blocks that are open, while the first found the collector on


@contextmanager
def paused_gc() -> Iterator[None]:
    """No collection in here: to walk over all that torch and transformers have made takes longer than many a step of a
    start, and happens again and again while objects are made.

    What is made in here counts as old afterwards, so that the first collection does not walk over all of it (unless
    the program itself has frozen objects, `FROZEN_BY_PYTHON` and more: they would be thawed with these). The last of
    several blocks that overlap, in whatever threads, ends the pause; where the collector is off before, nothing is
    done. Garbage from before stays where it is: who needs its memory collects it first.
    """
    with _Pauses.lock:
        is_paused = _Pauses.number > 0 or gc.isenabled()
        if is_paused:
            _Pauses.number += 1
            gc.disable()
    try:
        yield
    finally:
        if is_paused:
            _end()


def _end() -> None:
    with _Pauses.lock:
        _Pauses.number -= 1
        if _Pauses.number == 0:
            if gc.get_freeze_count() < FROZEN_BY_PYTHON:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
