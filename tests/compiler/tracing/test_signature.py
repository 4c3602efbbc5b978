"""An argument that is not a tensor is part of the trace: any other value is refused, however similar."""

from __future__ import annotations

import math
from typing import Any

import pytest

from piecegraph.compiler.tracing.signature import ConstantLeaf
from piecegraph.errors import InputMismatch


@pytest.mark.parametrize("value", [0.0, -0.0, 1, True, 2.5, 0j, "a", None, math.nan])
def test_the_traced_value_fits(value: Any) -> None:
    ConstantLeaf(path="x", value=value).check(value, {})


@pytest.mark.parametrize(
    ("traced", "given"),
    [
        (0.0, -0.0),
        (-0.0, 0.0),
        (0.0, 0),
        (1, True),
        (0j, -0j),
        (complex(0, 0.0), complex(0, -0.0)),
        (1.0, 1.5),
        ("a", "b"),
    ],
)
def test_another_value_is_refused(traced: Any, given: Any) -> None:
    with pytest.raises(InputMismatch, match="the model was traced with"):
        ConstantLeaf(path="x", value=traced).check(given, {})
