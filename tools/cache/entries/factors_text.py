"""Factors of keys, and where two keys' factors differ, as lines and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from piecegraph.cache.store.keys import MISSING, FactorDifference, join_path
from piecegraph.tools.cache.terminal.output import printable

LONGEST = 100
"""The most characters of a value in a table; `--json` has all of it."""


def value_text(value: Any) -> str:
    """Return a factor on one line; a long one is cut."""
    text = repr(value) if value is MISSING else printable(json.dumps(value, sort_keys=True, ensure_ascii=False))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def leaf_lines(factors: Any, path: str = "") -> Iterator[str]:
    """Return one line per leaf, in the order of paths, as in `config.compile_sizes[0] = 1`."""
    if isinstance(factors, dict) and factors:
        for name in sorted(factors):
            yield from leaf_lines(factors[name], join_path(path, name))
    elif isinstance(factors, list) and any(isinstance(each, dict | list) for each in factors):
        for index, each in enumerate(factors):
            yield from leaf_lines(each, f"{path}[{index}]")
    else:
        yield f"{printable(path)} = {value_text(factors)}"


def alike(differences: Sequence[FactorDifference]) -> list[list[FactorDifference]]:
    """Return `differences` in groups, in the order of their first members.

    The differences of a group have paths that differ in numbers only, and the same values on both sides: one setting
    of a model comes back in each of its layers.
    """
    groups: dict[tuple[str, str, str], list[FactorDifference]] = {}
    for each in differences:
        kind = (re.sub(r"\d+", "*", each.path), repr(each.left), repr(each.right))
        groups.setdefault(kind, []).append(each)
    return list(groups.values())


def difference_lines(differences: Sequence[FactorDifference], left: str, right: str) -> Iterator[str]:
    """Return three lines per group of similar differences: the factor, then its value on either side."""
    width = max(len(left), len(right))
    for each, *others in alike(differences):
        yield f"  {printable(each.path)}" + (f" and {len(others)} more like it" if others else "")
        yield f"    {left:{width}}  {value_text(each.left)}"
        yield f"    {right:{width}}  {value_text(each.right)}"


def difference_record(each: FactorDifference) -> dict[str, Any]:
    """Return a record with `path`, and with `left` and `right` where that side has the factor."""
    sides = {"left": each.left, "right": each.right}
    return {"path": each.path, **{side: value for side, value in sides.items() if value is not MISSING}}
