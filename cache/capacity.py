"""How much a cache may hold: past that, what was longest unused goes when something new has been compiled."""

from __future__ import annotations

import re

from piecegraph import environment
from piecegraph.errors import ConfigError

DEFAULT_MAX_BYTES = 10 << 30

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def max_cache_bytes() -> int:
    """What `PIECEGRAPH_CACHE_MAX_SIZE` says, or `DEFAULT_MAX_BYTES`. Raises `ConfigError` for what is no size."""
    text = environment.read(environment.CACHE_MAX_SIZE)
    if text is None:
        return DEFAULT_MAX_BYTES
    found = parse_bytes(text)
    if found is None:
        raise ConfigError(f"{environment.CACHE_MAX_SIZE}={text!r} is not a size like 500M or 10GiB.")
    return found


def parse_bytes(text: str) -> int | None:
    """Of `500M` or `10GiB`; K, M, G and T are powers of 1024. None: it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    return int(float(found[1]) * _UNITS[found[2]]) if found is not None else None
