"""End a program and every process it started, so that the next program has the machine to itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GONE_WITHIN_S = 30.0
"""A process with much GPU memory takes seconds to die: the driver gives the memory back first."""

_DEAD = "ZX"
"""States of a process that has released its resources but was not waited for yet."""


def end_group(group: int) -> None:
    """Kill each process of a process group, and wait until all of them have released their resources.

    Raises `TimeoutError` if a process lives after `GONE_WITHIN_S`: figures measured beside it would be wrong.
    """
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + GONE_WITHIN_S
    while alive := list(_alive(group)):
        if time.monotonic() > until:
            raise TimeoutError(f"processes {alive} of a program that was killed still live after {GONE_WITHIN_S:g} s.")
        time.sleep(0.01)


def _alive(group: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it ended meanwhile
                # proc(5): "pid (name) state parent group ...", and a name may hold spaces and brackets
                state, _, of_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(of_group) == group and state not in _DEAD:
                    yield int(folder.name)
