from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from piecegraph.tools.report.charts import HEIGHT, WIDTH, bars, stairs, timeline


def test_the_largest_bar_takes_the_whole_width() -> None:
    assert [(bar.name, bar.length) for bar in bars({"a": 2.0, "none": 0.0, "b": 8.0})] == [("a", 25.0), ("b", 100.0)]
    assert bars({}) == []


def test_phases_follow_each_other() -> None:
    found = timeline({"trace": 1.0, "nothing": 0.0, "split": 3.0})
    assert [(bar.name, bar.begin, bar.length) for bar in found] == [("trace", 0.0, 25.0), ("split", 25.0, 75.0)]


def row(first: int, last: int, mode: str, num_tokens: int | None) -> dict[str, Any]:
    return {"first": first, "last": last, "mode": mode, "num_tokens": num_tokens, "reason": None}


def test_stairs_cover_the_drawing_without_gaps() -> None:
    """Sizes grow to the right; the largest padded size is as high as the drawing."""
    found = stairs([row(1, 1, "FULL", 1), row(2, 4, "FULL", 4), row(5, 9, "NONE", None)])
    assert found[0].x == 0.0
    for one, other in pairwise(found):
        assert one.x + one.width == pytest.approx(other.x)
    assert found[-1].x + found[-1].width == pytest.approx(WIDTH)
    assert max(step.height for step in found) == pytest.approx(HEIGHT)
    assert [step.height for step in found] == sorted(step.height for step in found)
    assert [step.title for step in found] == ["1: FULL, padded to 1", "2 to 4: FULL, padded to 4", "5 to 9: NONE"]
    assert stairs([]) == []
