"""Where Inductor and Triton keep their own files while we compile and load: in folders of ours."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

_environment_lock = threading.RLock()


@contextlib.contextmanager
def inductor_cache_dir(directory: Path, triton: Path) -> Iterator[None]:
    """Inductor's and Triton's own caches live in these folders inside this block, and the process's
    settings are as before after it. One thread at a time: the variables are the process's."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _CACHE_VARIABLES}
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
        os.environ["TRITON_CACHE_DIR"] = str(triton)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def child_environment(cache_dir: Path, triton: Path) -> dict[str, str]:
    """This process's environment for a child that compiles: same import path, Inductor's and Triton's
    caches in these folders."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir),
        "TRITON_CACHE_DIR": str(triton),
    }
