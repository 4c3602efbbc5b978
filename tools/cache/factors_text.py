"""Factors of keys, and where two keys' factors differ, as lines and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from piecegraph.cache.keys import MISSING, FactorDifference, join_path
from piecegraph.tools.cache.output import printable

LONGEST = 100
"""Characters of a value in a table; `--json` has all of it."""


def value_text(value: Any) -> str:
    """A factor on one line; what is long is cut."""
    text = repr(value) if value is MISSING else printable(json.dumps(value, sort_keys=True, ensure_ascii=False))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def leaf_lines(factors: Any, path: str = "") -> Iterator[str]:
    """`config.compile_sizes[0] = 1`, a line a leaf, in the order of paths."""
    if isinstance(factors, dict) and factors:
        for name in sorted(factors):
            yield from leaf_lines(factors[name], join_path(path, name))
    elif isinstance(factors, list) and any(isinstance(each, dict | list) for each in factors):
        for index, each in enumerate(factors):
            yield from leaf_lines(each, f"{path}[{index}]")
    else:
        yield f"{printable(path)} = {value_text(factors)}"


def alike(differences: Sequence[FactorDifference]) -> list[list[FactorDifference]]:
    """`differences` in groups, in order of their first: those whose paths differ in numbers only, and on which both
    sides are the same. One setting of a model comes back in each of its layers."""
    groups: dict[tuple[str, str, str], list[FactorDifference]] = {}
    for each in differences:
        kind = (re.sub(r"\d+", "*", each.path), repr(each.left), repr(each.right))
        groups.setdefault(kind, []).append(each)
    return list(groups.values())


def difference_lines(differences: Sequence[FactorDifference], left: str, right: str) -> Iterator[str]:
    """Three lines a group of differences that are alike: the factor, then what it is on either side."""
    width = max(len(left), len(right))
    for each, *others in alike(differences):
        yield f"  {printable(each.path)}" + (f" and {len(others)} more like it" if others else "")
        yield f"    {left:{width}}  {value_text(each.left)}"
        yield f"    {right:{width}}  {value_text(each.right)}"


def difference_record(each: FactorDifference) -> dict[str, Any]:
    """`path`, and `left` and `right` where the factor is there at all."""
    sides = {"left": each.left, "right": each.right}
    return {"path": each.path, **{side: value for side, value in sides.items() if value is not MISSING}}
