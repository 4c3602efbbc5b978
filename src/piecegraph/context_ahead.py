"""The GPU's context, made by a thread beside imports: the driver takes some tenths of a second for it, and needs no
Python meanwhile.

Driver API, "Primary Context Management": whoever asks for a device's primary context gets the same, torch too.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class ContextAhead:
    """The primary context of GPU `index`, retained from when `start` has it made until `release`.

    Where the driver refuses, or there is none, nothing is retained: whoever needs the GPU will say so. `load`: gives
    the driver's library, or raises OSError.
    """

    def __init__(self, index: int, load: Callable[[], Any] = lambda: ctypes.CDLL("libcuda.so.1")) -> None:
        self.is_retained = False
        self._index = index
        self._load = load
        self._thread = threading.Thread(target=self._run, name="piecegraph context ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def release(self) -> None:
        """Wait until it is there, and leave it to others; it ends if there are none. Harmless when repeated."""
        self._thread.join()
        if self.is_retained:
            self.is_retained = False
            self._driver.cuDevicePrimaryCtxRelease_v2(self._device)

    def _run(self) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        with suppress(OSError, AttributeError):
            self._driver = self._load()
            failed = (
                self._driver.cuInit(0)
                or self._driver.cuDeviceGet(ctypes.byref(device), self._index)
                or self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            )
            self._device, self.is_retained = device, not failed


@contextmanager
def making_context(device: object) -> Iterator[None]:
    """Make the context of `device`, as `LLM` takes it, while the block runs. None, or a device without a number, is the
    first. Nothing for another than a GPU, nor where torch has its context already."""
    found = re.fullmatch(r"cuda(?::(\d+))?", "cuda" if device is None else str(device))
    torch = sys.modules.get("torch")
    if found is None or (torch is not None and torch.cuda.is_initialized()):
        yield
        return
    ahead = ContextAhead(int(found[1] or 0))
    ahead.start()
    try:
        yield
    finally:
        ahead.release()
