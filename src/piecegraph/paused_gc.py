"""Python's garbage collector, paused while very much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """No collection in here: to walk over all that torch and transformers have made takes longer than many a step of a
    start, and happens again and again while objects are made.

    What is made in here counts as old afterwards, so that the first collection does not walk over all of it (unless
    the program itself has frozen objects, which `gc.freeze` counts with these). Inside another such block, and where
    the collector is off, nothing is done.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
        gc.enable()
