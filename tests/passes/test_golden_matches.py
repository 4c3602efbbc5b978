"""Every pass finds in every family what `golden_matches.json` says: a fusion that stops matching is seen here."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from piecegraph.passes.pipeline import all_passes
from tests.passes.golden_matches import COMMAND, OF_TWO_RANKS, committed_matches, difference, found_matches
from tests.quick_families import families
from tests.runner.tiny_models import FAMILIES, UNLISTED


@pytest.mark.parametrize("family", families([*FAMILIES, *UNLISTED, *OF_TWO_RANKS]))
def test_matches_and_misses_are_those_committed(family: str) -> None:
    changed = difference(committed_matches().get(family, {}), found_matches(family))
    if not version("transformers").startswith("5.17."):  # models of other versions have other operations without effect
        changed = [line for line in changed if not line.startswith("eliminate-noops:")]
    assert not changed, "; ".join([f"{family}: {line}" for line in changed]) + f". If that is meant: {COMMAND}"


def test_the_table_has_every_pass_and_every_family() -> None:
    table = committed_matches()
    assert list(table) == [*FAMILIES, *UNLISTED, *OF_TWO_RANKS]
    passes = [each.name for each in all_passes()]
    assert all(list(rows) == passes for rows in table.values()), f"its passes are not {passes}: {COMMAND}"


def test_a_difference_names_the_pass_and_both_counts() -> None:
    one = {"a": {"matches": 1, "misses": 0}, "b": {"matches": 2, "misses": 0}}
    other = {"a": {"matches": 1, "misses": 1}, "b": {"matches": 2, "misses": 0}, "c": {"matches": 3, "misses": 0}}
    assert difference(one, one) == []
    assert difference(one, other) == [
        "a: committed {'matches': 1, 'misses': 0}, found {'matches': 1, 'misses': 1}",
        "c: committed None, found {'matches': 3, 'misses': 0}",
    ]
