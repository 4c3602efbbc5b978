"""A plot is well-formed SVG with all lines and words, and the same bytes for the same numbers."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from piecegraph.tools.bench.growth.svg_plot import Line, Plot, as_svg

SVG = "{http://www.w3.org/2000/svg}"


def a_plot(*lines: Line, is_log: bool = True) -> Plot:
    return Plot(name="batch", title="A <step> & more", x="requests", y="ms", lines=lines, is_log=is_log)


LINES = (
    Line("FULL", ((1, 0.7), (8, 1.1), (64, 2.0))),
    Line("floor", ((1, 0.3), (64, 1.0)), is_reference=True),
    Line("nothing yet", ()),
)


@pytest.mark.parametrize("is_log", [True, False])
def test_lines_and_words_are_in_it(is_log: bool) -> None:
    text = as_svg(a_plot(*LINES, is_log=is_log), "one GPU")
    words = {word for each in ElementTree.fromstring(text).iter(f"{SVG}text") for word in (each.text or "").split("\n")}
    assert {"A <step> & more", "one GPU", "requests", "ms", "FULL", "floor"} <= words
    assert ("64" in words) is is_log, "a logarithmic axis has a tick at each number that was measured"
    assert text == as_svg(a_plot(*LINES, is_log=is_log), "one GPU")


def test_a_reference_is_dashed_in_the_colour_of_the_line_before_it() -> None:
    plain = as_svg(a_plot(LINES[0]))
    dashes = as_svg(a_plot(*LINES[:2]))
    assert plain.count("stroke-dasharray") < dashes.count("stroke-dasharray")
    assert dashes.count("stroke: #1f77b4") > plain.count("stroke: #1f77b4")


def test_nothing_to_plot_and_nothing_a_logarithm_has_are_refused() -> None:
    with pytest.raises(ValueError, match="the plot 'batch' has no points"):
        as_svg(a_plot(Line("empty", ())))
    with pytest.raises(ValueError, match=r"0 has no place on a logarithmic axis; plot it with is_log=False\."):
        as_svg(a_plot(Line("a", ((1, 0.0), (2, 1.0)))))
