from __future__ import annotations

from piecegraph.cache.store.keys import MISSING, FactorDifference, diff_factors
from piecegraph.tools.cache.entries.factors_text import (
    alike,
    difference_lines,
    difference_record,
    leaf_lines,
    value_text,
)


def test_factors_leaf_by_leaf() -> None:
    factors = {"b": {"sizes": [1, 2], "none": {}, "deep": [{"x": 1}, 2]}, "a": "text\n"}
    assert list(leaf_lines(factors)) == [
        'a = "text\\n"',
        "b.deep[0].x = 1",
        "b.deep[1] = 2",
        "b.none = {}",
        "b.sizes = [1, 2]",
    ]


def test_long_values_are_cut() -> None:
    assert value_text("x" * 200) == '"' + "x" * 99 + "... (202 characters)"
    assert value_text(MISSING) == "(not there)"


def test_equal_differences_of_layers_are_shown_once() -> None:
    left, right = ({"layers": {f"layers.{n}.norm": {"eps": eps} for n in range(28)}, "x": eps} for eps in (1, 2))
    differences = diff_factors(left, right)
    assert [len(group) for group in alike(differences)] == [28, 1]
    assert list(difference_lines(differences, "abc", "d")) == [
        "  layers.layers.0.norm.eps and 27 more like it",
        "    abc  1",
        "    d    2",
        "  x",
        "    abc  1",
        "    d    2",
    ]


def test_other_values_are_another_group() -> None:
    left, right = {"sizes": [1, 2]}, {"sizes": [2, 3]}
    assert len(alike(diff_factors(left, right))) == 2


def test_json_leaves_out_the_side_that_is_not_there() -> None:
    assert difference_record(FactorDifference("a", MISSING, None)) == {"path": "a", "right": None}
    assert difference_record(FactorDifference("a", 1, MISSING)) == {"path": "a", "left": 1}
