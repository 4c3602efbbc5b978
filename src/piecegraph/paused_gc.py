"""A pause of Python's garbage collector, for code that makes very many objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_BY_PYTHON = 2000
"""Python 3.12 starts with some hundreds of frozen objects. A program that freezes its own objects has many more."""


@contextmanager
def paused_gc() -> Iterator[None]:
    """Turn automatic collections off inside the block, and on again after it if they were on before.

    Objects made inside the block count as old afterwards, so that the next collection of young objects does not walk
    over all of them. Objects that the program itself has frozen stay frozen: where there are `FROZEN_BY_PYTHON` or
    more, ages are left alone, because moving them would thaw the program's objects too.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < FROZEN_BY_PYTHON:
            gc.freeze()
            gc.unfreeze()
        gc.enable()
