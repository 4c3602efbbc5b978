"""The one place that reads the process's environment.

Every variable of ours begins with `PIECEGRAPH_`. `compiler/inductor_caches.py` alone is excused: torch's
own caches are steered by variables of torch's. Of those of others, `compiler/torch_compat.py` asks how torch's
allocator is set, and `runner/step_memory.py` what libraries allocate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

PREFIX = "PIECEGRAPH_"

CACHE_DIR = "PIECEGRAPH_CACHE_DIR"
"""Folder that holds what piecegraph keeps between runs; instead of the user's cache directory."""

CACHE = "PIECEGRAPH_CACHE"
"""How much of what is compiled is kept: `on`, `pieces` or `off` (`CompileConfig.cache`)."""

CACHE_MAX_SIZE = "PIECEGRAPH_CACHE_MAX_SIZE"
"""How much a cache may hold, `500M` or `10GiB`; past that, what was longest unused goes (`cache/capacity.py`)."""

SIGNING_KEY_FILE = "PIECEGRAPH_SIGNING_KEY_FILE"
"""A key whose entries count as well as the user's own (`CompileConfig.signing_key_file`)."""


def read(name: str) -> str | None:
    """The value of `name`; None when it is unset or empty."""
    return os.environ.get(name) or None


def ours() -> dict[str, str]:
    """Every variable that begins with `PIECEGRAPH_`, known or not, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}


def for_child(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and import path, with `changes`, for a Python process that it starts."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, **changes}
