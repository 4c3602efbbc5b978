"""A small line plot as SVG text, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 48, 48  # margins; names of lines are in the right one
COLORS = ("#1f5fa8", "#c2571a", "#2b8a3e", "#7b3fa0", "#a61e4d", "#0b7285")
INK, GRID = "#222222", "#dddddd"
NAME_HEIGHT = 14  # pixels between two names


@dataclass(frozen=True, slots=True)
class Line:
    """The points of one name. A reference is drawn thin and dashed, in the colour of the line before it."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_reference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A set of lines over one pair of axes."""

    name: str  # of its file
    title: str
    x: str  # what is along the axis, with its unit
    y: str
    lines: tuple[Line, ...]
    is_log: bool = True  # both axes; else both begin at 0


@dataclass(frozen=True, slots=True)
class Axis:
    """A mapping from values to pixels."""

    ticks: tuple[float, ...]
    at: Callable[[float], float]  # value -> 0 to 1


def log_axis(values: Sequence[float], ticks: Sequence[float] = ()) -> Axis:
    """Return a logarithmic axis from the least to the greatest value; the default ticks are 1, 2 and 5 times powers
    of ten.
    """
    least, most = min(values), max(values)
    if least <= 0:
        raise ValueError(f"{least:g} has no place on a logarithmic axis; plot it with is_log=False.")
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    candidates = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    low = max((tick for tick in candidates if tick <= least * 1.000001), default=least)
    high = min((tick for tick in candidates if tick >= most * 0.999999), default=most)
    if low == high:
        low, high = low / 2, high * 2
    span = math.log(high / low)
    shown = ticks or [tick for tick in candidates if low <= tick <= high]
    return Axis(tuple(shown), lambda value: math.log(value / low) / span)


def linear_axis(values: Sequence[float]) -> Axis:
    """Return an axis from 0 to a round number above the greatest value, in four to ten parts."""
    most = max(*values, 1e-9)
    power = 10.0 ** math.floor(math.log10(most))
    part = next(factor * power for factor in (0.1, 0.2, 0.25, 0.5, 1, 2) if most / (factor * power) <= 10)
    count = max(math.ceil(most / part - 1e-9), 1)
    return Axis(tuple(part * i for i in range(count + 1)), lambda value: value / (part * count))


def as_svg(plot: Plot, note: str = "") -> str:
    """Return the plot as SVG. `note` is a small line under the title that says where the numbers are from.

    Raises `ValueError` for a plot without points, and for a number of 0 or less on a logarithmic axis.
    """
    xs = [x for line in plot.lines for x, _ in line.points]
    ys = [y for line in plot.lines for _, y in line.points]
    if not xs:
        raise ValueError(f"the plot {plot.name!r} has no points.")
    x_axis = log_axis(xs, sorted(set(xs))) if plot.is_log else linear_axis(xs)
    y_axis = log_axis(ys) if plot.is_log else linear_axis(ys)
    return "\n".join([*_head(plot, note), *_grid(plot, x_axis, y_axis), *_lines(plot, x_axis, y_axis), "</svg>", ""])


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.at(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.at(value) * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, color: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(text)}</text>'
    )


def _head(plot: Plot, note: str) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" role="img">'
    )
    yield f"<title>{escape(plot.title)}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield _text(LEFT, 20, plot.title, size=14)
    if note:
        yield _text(LEFT, 36, note, size=10)


def _grid(plot: Plot, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in x_axis.ticks:
        x = _x(x_axis, tick)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>'
        yield _text(x, bottom + 16, f"{tick:g}", anchor="middle", size=11)
    for tick in y_axis.ticks:
        y = _y(y_axis, tick)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 6, y + 4, f"{tick:g}", anchor="end", size=11)
    yield _text((LEFT + right) / 2, HEIGHT - 10, plot.x, anchor="middle")
    yield _text(LEFT - 6, TOP - 2, plot.y, anchor="end")


def _lines(plot: Plot, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    number = -1
    names: list[tuple[float, str, str]] = []  # where the line ends, its name and colour
    for line in plot.lines:
        number += not line.is_reference
        color = COLORS[max(number, 0) % len(COLORS)]
        places = [(_x(x_axis, x), _y(y_axis, y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = 'stroke-width="1" stroke-dasharray="4 3"' if line.is_reference else 'stroke-width="2"'
        yield f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>'
        if not line.is_reference:
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places)
        if places:
            names.append((places[-1][1], line.name, color))
    for y, name, color in _apart(names):
        yield _text(WIDTH - RIGHT + 8, y + 4, name, color=color)


def _apart(names: Sequence[tuple[float, str, str]]) -> Iterator[tuple[float, str, str]]:
    """Yield labels from the top down, moved so that none covers another."""
    lowest = -math.inf
    for y, name, color in sorted(names):
        lowest = max(y, lowest + NAME_HEIGHT)
        yield lowest, name, color
