"""The one place that reads the process's environment.

Every variable of ours begins with `PIECEGRAPH_`. `compiler/torch_compat.py` alone is excused: torch's
own caches are steered by variables of torch's.
"""

from __future__ import annotations

import os

PREFIX = "PIECEGRAPH_"

CACHE_DIR = "PIECEGRAPH_CACHE_DIR"
"""Folder that holds what piecegraph keeps between runs; instead of the user's cache directory."""


def read(name: str) -> str | None:
    """The value of `name`; None when it is unset or empty."""
    return os.environ.get(name) or None


def ours() -> dict[str, str]:
    """Every variable that begins with `PIECEGRAPH_`, known or not, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}
