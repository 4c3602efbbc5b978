"""Handling of Ctrl-C that loses no interrupt.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a `__del__`, a callback of a weak reference
or a hook that C code calls it is printed as "ignored", and the program goes on. So the handler remembers the
interrupt, and code that is called now and then (phases, tokens) checks for it again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130
"""The exit code: 128 and the number of SIGINT, as shells count."""


class InterruptHandler:
    """A handler of SIGINT that remembers interrupts.

    The first SIGINT raises KeyboardInterrupt, and is remembered; the second ends the process at once, whatever it is
    doing, with `INTERRUPTED`.
    """

    def __init__(self) -> None:
        self.was_asked = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.was_asked:
            os.write(2, b"interrupted\n")  # no stream: it may be in the middle of a write
            os._exit(INTERRUPTED)
        self.was_asked = True
        raise KeyboardInterrupt


@contextmanager
def remembered_interrupts() -> Iterator[InterruptHandler]:
    """Install an `InterruptHandler` for SIGINT inside the block, and do not print an interrupt that is lost.

    Where other code handles or ignores SIGINT (a background job of a shell does), and outside of the main thread,
    which alone may set handlers, nothing changes.
    """
    handler = InterruptHandler()
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    show_unraisable = sys.unraisablehook

    def show_all_but_interrupts(lost: UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            show_unraisable(lost)

    if is_ours:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = show_all_but_interrupts
    try:
        yield handler
    finally:
        if is_ours:
            sys.unraisablehook = show_unraisable
        if is_ours and signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if the process was asked to end and goes on all the same."""
    handler = signal.getsignal(signal.SIGINT)  # the process's own table: no variable of ours to share
    if isinstance(handler, InterruptHandler) and handler.was_asked:
        raise KeyboardInterrupt
