"""A small line plot as SVG text by matplotlib (the extra `plots`), the same bytes for the same numbers."""

from __future__ import annotations

import io
from dataclasses import dataclass

from piecegraph.errors import ConfigError


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


def as_svg(plot: Plot, note: str = "") -> str:
    """Return the plot as SVG. `note` is a small line under the title that says where the numbers are from.

    Raises `ValueError` for a plot without points, and for a number of 0 or less on a logarithmic axis. Raises
    `ConfigError` where matplotlib is not installed.
    """
    points = [point for line in plot.lines for point in line.points]
    if not points:
        raise ValueError(f"the plot {plot.name!r} has no points.")
    least = min(min(point) for point in points)
    if plot.is_log and least <= 0:
        raise ValueError(f"{least:g} has no place on a logarithmic axis; plot it with is_log=False.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('plots need matplotlib, which is not installed: pip install "piecegraph[plots]"') from error
    # Text stays text, and no id is random: the same numbers give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(f"{plot.title}\n{note}" if note else plot.title, loc="left", fontsize="medium")
        color = None
        for line in plot.lines:
            style = {"linestyle": "--", "linewidth": 1, "color": color} if line.is_reference else {"marker": "o"}
            (drawn,) = axes.plot(*zip(*line.points, strict=True), label=line.name, **style) if line.points else (None,)
            color = drawn.get_color() if drawn is not None else color
        axes.set(xlabel=plot.x, ylabel=plot.y)
        if plot.is_log:
            ticks = sorted({x for x, _ in points})
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        else:
            axes.set(xlim=(0, None), ylim=(0, None))
        axes.grid(visible=True, color="#dddddd")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
