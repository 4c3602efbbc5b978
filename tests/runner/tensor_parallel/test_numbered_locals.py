"""Sources that differ in the names of their local variables alone are equal; any other difference stays."""

from __future__ import annotations

import pytest

from piecegraph.runner.tensor_parallel.numbered_locals import with_numbered_locals

SOURCE = """
def forward(input_ids, weight_0):
    getitem_91 = piece_0(input_ids, weight_0)
    getitem_92 = piece_1(getitem_91)
    del getitem_91
    return (getitem_92,)
"""


def test_other_names_of_locals_give_the_same() -> None:
    renamed = SOURCE.replace("getitem_92", "add_3").replace("getitem_91", "getitem_96")
    assert renamed != SOURCE
    assert with_numbered_locals(renamed) == with_numbered_locals(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("piece_1", "piece_0"),  # what is called
        ("piece_1(getitem_91)", "piece_1(input_ids)"),  # on what
        ("input_ids, weight_0):", "weight_0, input_ids):"),  # the order of parameters
        ("(getitem_92,)", "(getitem_92, getitem_92)"),  # what is returned
        ("    del getitem_91\n", ""),
    ],
)
def test_any_other_difference_stays(old: str, new: str) -> None:
    other = SOURCE.replace(old, new)
    assert other != SOURCE
    assert with_numbered_locals(other) != with_numbered_locals(SOURCE)


def test_names_from_elsewhere_stay() -> None:
    """A name that the source does not assign is a global, and says what is called."""
    assert "piece_0(local_0, local_1)" in with_numbered_locals(SOURCE)
