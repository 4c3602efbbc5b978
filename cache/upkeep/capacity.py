"""The capacity of a cache. Beyond it, the least recently used entries are removed when something was compiled."""

from __future__ import annotations

import re

from piecegraph import environment
from piecegraph.errors import ConfigError

DEFAULT_MAX_BYTES = 10 << 30

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def max_cache_bytes() -> int:
    """Return the size in `PIECEGRAPH_CACHE_MAX_SIZE`, or `DEFAULT_MAX_BYTES`. Raises `ConfigError` for a bad one."""
    text = environment.read(environment.CACHE_MAX_SIZE)
    if text is None:
        return DEFAULT_MAX_BYTES
    found = parse_bytes(text)
    if found is None:
        raise ConfigError(f"{environment.CACHE_MAX_SIZE}={text!r} is not a size like 500M or 10GiB.")
    return found


def parse_bytes(text: str) -> int | None:
    """Return the bytes that a text like `500M` or `10GiB` means, or None. K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    return int(float(found[1]) * _UNITS[found[2]]) if found is not None else None
