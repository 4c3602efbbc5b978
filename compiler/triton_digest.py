"""Triton's digest over its own files, found out beside imports.

It is part of the name under which Triton and Inductor keep a kernel, so loading one waits for it: 0.4 s on a fast
machine, 1.3 on a slow one, once a process. It reads and hashes 400 MB, for which Python's lock is not held.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import torch


@contextlib.contextmanager
def found_beside(device: torch.device) -> Iterator[None]:
    """The digest is there when the block ends, if kernels are loaded on `device`. Triton itself is imported first: two
    threads that import it could wait for each other."""
    if device.type != "cuda" or find_spec("triton") is None:
        yield
        return
    from triton.runtime import cache

    thread = threading.Thread(target=_find, args=(getattr(cache, "triton_key", None),), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _find(triton_key: object) -> None:
    """Whatever is wrong with it is Triton's to say, where it asks for it itself."""
    if callable(triton_key):
        with contextlib.suppress(Exception):
            triton_key()
