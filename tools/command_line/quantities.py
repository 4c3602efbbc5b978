"""Sizes, durations and times, as people read and write them."""

from __future__ import annotations

import re
from typing import Any

import click

from piecegraph.cache.upkeep.capacity import parse_bytes

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def bytes_text(size: int) -> str:
    """Return a size as text, as in `"340 B"` or `"1.4 MiB"`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Return a duration as text, as in `"40 ms"`, `"12.3 s"`, `"4 min"`, `"3.5 h"` or `"12.0 d"`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"


def ago_text(then: float, now: float) -> str:
    """Return a past time as text, as in `"4 min ago"`; `"never"` for 0, the time of entries that cannot be read."""
    return "never" if then <= 0 else f"{seconds_text(max(0.0, float(round(now - then))))} ago"


class Bytes(click.ParamType[Any]):
    """A size like 500M or 10GiB; K, M, G and T are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = parse_bytes(str(value))
        if found is None:
            self.fail(f"{value!r} is not a size like 500M or 10GiB.", param, ctx)
        return found


class Duration(click.ParamType[Any]):
    """A duration like 30d, 12h or 90min, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)", str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is not a duration like 30d, 12h, 90min or 45s.", param, ctx)
        return float(found[1]) * _SECONDS[found[2]]


BYTES = Bytes()
DURATION = Duration()
