"""The process's environment, read in this one place.

Every variable of ours begins with `PIECEGRAPH_`. Only `compiler/inductor/caches.py` is exempt: torch's own caches are
controlled by torch's variables.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PREFIX = "PIECEGRAPH_"

_BEING_SET = threading.RLock()

CACHE_DIR = "PIECEGRAPH_CACHE_DIR"
"""The directory of what piecegraph keeps between runs, instead of the user's cache directory."""

CACHE = "PIECEGRAPH_CACHE"
"""The part of compiled code that is kept: `on`, `pieces` or `off` (`CompileConfig.cache`)."""

CACHE_MAX_SIZE = "PIECEGRAPH_CACHE_MAX_SIZE"
"""The size that a cache may have, such as `500M` or `10GiB`; beyond that, the least recently used entries are removed
(`cache/upkeep/capacity.py`)."""

SIGNING_KEY_FILE = "PIECEGRAPH_SIGNING_KEY_FILE"
"""The keys that are trusted besides the user's own: files and folders, joined by `:`
(`CompileConfig.signing_key_file`)."""

API_KEY = "PIECEGRAPH_API_KEY"
"""A key that requests to `piecegraph serve` must have."""

SYMMETRIC_SUMS = "PIECEGRAPH_SYMMETRIC_SUMS"
"""`0`: sums over the GPUs of one host go through NCCL and never through symmetric memory
(`runner/tensor_parallel/symmetric_memory/`)."""

CPU_KERNELS = "PIECEGRAPH_CPU_KERNELS"
"""`0`: torch's functions compute on a CPU what our C++ kernels would (`runner/models/cpu_kernels.py`).
Read when a process loads its first model that could use them."""

GPUS = "CUDA_VISIBLE_DEVICES"
"""CUDA's own: the GPUs that a process sees, by number or name, joined by commas."""


NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""torch's own: what its process groups over NCCL do about a lost or late rank; by default they end this process."""


def is_set(name: str) -> bool:
    """Return whether `name` is set, be it to nothing."""
    return name in os.environ


def read(name: str) -> str | None:
    """Return the value of `name`, or None if it is unset or empty."""
    return os.environ.get(name) or None


def piecegraph_variables() -> dict[str, str]:
    """Return every variable that begins with `PIECEGRAPH_`, known or not, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment and import path, with `changes`, for a Python process that it starts."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, **changes}


@contextmanager
def set_by_default(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process inside the block, unless it is set; one thread at a time."""
    with _BEING_SET:
        if name in os.environ:
            yield
            return
        os.environ[name] = value
        try:
            yield
        finally:
            os.environ.pop(name, None)


def gpus_of(first: int, count: int) -> dict[str, str]:
    """Return the change for `child_environment` that shows a process `count` of this one's GPUs, from `first` on."""
    visible = os.environ.get(GPUS)
    names = [str(number) for number in range(first + count)] if visible is None else visible.split(",")
    return {GPUS: ",".join(names[first : first + count])}


def is_environ_data(mapping: object) -> bool:
    """Return whether `mapping` is the mapping inside `os.environ`, which a trace of a lookup reaches."""
    return mapping is getattr(os.environ, "_data", None)
