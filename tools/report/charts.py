"""The charts of a report as plain numbers: where bars begin and end, where a staircase turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any, NamedTuple

WIDTH, HEIGHT = 640.0, 220.0
"""The size of the drawing of a dispatch table, in units of its view box."""


class Bar(NamedTuple):
    """A bar of a chart."""

    name: str
    value: float
    begin: float  # per cent of the width
    length: float  # per cent of the width


class Stair(NamedTuple):
    """A range of batches as a rectangle, in units of the drawing's view box."""

    x: float
    y: float
    width: float
    height: float
    mode: str
    title: str


def bars(values: Mapping[str, float]) -> list[Bar]:
    """Return a bar for each positive value, all from 0; the largest takes the whole width."""
    top = max(values.values(), default=0.0)
    return [Bar(name, value, 0.0, 100 * value / top) for name, value in values.items() if value > 0]


def timeline(seconds: Mapping[str, float]) -> list[Bar]:
    """Return a bar for each phase that took time, each beginning where the preceding one ended."""
    total, begin, found = sum(seconds.values()), 0.0, []
    for name, value in seconds.items():
        if value > 0:
            found.append(Bar(name, value, 100 * begin / total, 100 * value / total))
            begin += value
    return found


def stairs(ranges: Sequence[Mapping[str, Any]]) -> list[Stair]:
    """Return the rectangles of a dispatch table: sizes of batches to the right, padded sizes upwards, both by log 2.

    Ranges that are not padded (NONE) are as high as their largest batch.
    """
    if not ranges:
        return []
    last = max(row["num_tokens"] or row["last"] for row in ranges)
    right, top = log2(ranges[-1]["last"] + 1), log2(last + 1)
    found = []
    for row in ranges:
        padded = row["num_tokens"]
        begin, end = log2(row["first"]) / right * WIDTH, log2(row["last"] + 1) / right * WIDTH
        height = log2((padded or row["last"]) + 1) / top * HEIGHT
        sizes = f"{row['first']}" if row["first"] == row["last"] else f"{row['first']} to {row['last']}"
        title = f"{sizes}: {row['mode']}" + (f", padded to {padded}" if padded else "")
        found.append(Stair(begin, HEIGHT - height, end - begin, height, row["mode"], title))
    return found
