"""A plot is well-formed SVG, every point is where its axis says, and names of lines do not overlap."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from piecegraph.tools.bench.growth.svg_plot import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NAME_HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    Plot,
    as_svg,
    linear_axis,
    log_axis,
)

SVG = "{http://www.w3.org/2000/svg}"


def a_plot(*lines: Line, is_log: bool = True) -> Plot:
    return Plot(name="batch", title="A <step> & more", x="requests", y="ms", lines=lines, is_log=is_log)


def drawn(plot: Plot, note: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(as_svg(plot, note))


def test_lines_points_and_words_are_in_it() -> None:
    root = drawn(
        a_plot(Line("FULL", ((1, 0.7), (8, 1.1), (64, 2.0))), Line("floor", ((1, 0.3), (64, 1.0)), is_reference=True)),
        "one GPU",
    )
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"A <step> & more", "one GPU", "requests", "ms", "FULL", "floor", "1", "8", "64"} <= set(words)
    full, floor = root.iter(f"{SVG}polyline")
    assert len((full.get("points") or "").split()) == 3
    assert full.get("stroke-dasharray") is None and floor.get("stroke-dasharray") is not None
    assert full.get("stroke") == floor.get("stroke")
    assert len(list(root.iter(f"{SVG}circle"))) == 3


@pytest.mark.parametrize("is_log", [True, False])
def test_every_point_is_inside_the_axes(is_log: bool) -> None:
    root = drawn(a_plot(Line("a", ((1, 0.031), (3, 5.0), (1000, 99.0))), is_log=is_log))
    for point in root.iter(f"{SVG}circle"):
        assert LEFT <= float(point.get("cx", "nan")) <= WIDTH - RIGHT
        assert TOP <= float(point.get("cy", "nan")) <= HEIGHT - BOTTOM


def test_equal_factors_are_equal_distances_on_a_logarithmic_axis() -> None:
    axis = log_axis([1, 100])
    assert axis.at(1) == 0 and axis.at(100) == 1
    assert axis.at(10) == pytest.approx(0.5)
    assert axis.ticks == (1, 2, 5, 10, 20, 50, 100)
    assert log_axis([3, 3]).at(3) == pytest.approx(0.5, abs=0.5)


@pytest.mark.parametrize(("most", "last"), [(0.9, 0.9), (7, 7), (28, 30), (63, 70), (1000, 1000)])
def test_a_linear_axis_begins_at_nothing_and_ends_at_a_round_number(most: float, last: float) -> None:
    axis = linear_axis([0.1, most])
    assert axis.ticks[0] == 0
    assert axis.ticks[-1] == pytest.approx(last)
    assert 4 <= len(axis.ticks) <= 11
    assert axis.at(0) == 0 and axis.at(axis.ticks[-1]) == pytest.approx(1)


def test_names_of_lines_that_end_together_stay_apart() -> None:
    root = drawn(a_plot(*(Line(f"line {i}", ((1, 1.0), (2, 1.0 + i / 1000))) for i in range(4))))
    ends = [float(text.get("y", "nan")) for text in root.iter(f"{SVG}text") if (text.text or "").startswith("line ")]
    assert all(below - above >= NAME_HEIGHT - 0.1 for above, below in pairwise(ends))


def test_nothing_to_plot_and_nothing_a_logarithm_has_are_refused() -> None:
    with pytest.raises(ValueError, match="the plot 'batch' has no points"):
        as_svg(a_plot(Line("empty", ())))
    with pytest.raises(ValueError, match=r"0 has no place on a logarithmic axis; plot it with is_log=False\."):
        as_svg(a_plot(Line("a", ((1, 0.0), (2, 1.0)))))
