"""Conditions on sizes: our parser gives sympy's text the meaning that sympy gives it."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from piecegraph.compiler.common.size_conditions import MAX_TEXT, NotACondition, SizeCondition

U0, U1 = (sympy.Symbol(name, integer=True, positive=True) for name in ("u0", "u1"))
CONDITIONS = (
    sympy.Ge(U0, 3),
    sympy.Ne(U0, U1),
    sympy.Eq(Mod(U0, 4), 0),
    sympy.Eq(PythonMod(U0 + U1, 3), 1),
    sympy.Lt(2 * U0 - U1, U1**2 + 5),
    sympy.Le(FloorDiv(U0, 2), U1),
    sympy.Eq(sympy.Max(U0, U1), sympy.Min(U0, 7)),
    sympy.And(sympy.Gt(U0, 1), sympy.Lt(U1, 9)),
    sympy.Or(sympy.Gt(U0, 7), sympy.Not(sympy.Eq(U1, 2))),
    sympy.Eq(U0 * sympy.Rational(1, 2), U1),
)


@pytest.mark.parametrize("expression", CONDITIONS, ids=str)
def test_text_means_what_sympy_means(expression: sympy.Basic) -> None:
    condition = SizeCondition.from_sympy(expression)
    parsed = SizeCondition.parse(condition.text)
    assert parsed.symbols == condition.symbols
    for u0 in range(1, 12):
        for u1 in range(1, 12):
            values = {"u0": u0, "u1": u1, "unused": 5}
            assert parsed.is_violated_by(values) == condition.is_violated_by(values), values


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "u0.__class__ > 1",
        "[u0] == [1]",
        "(lambda: 1)() == 1",
        "u0 if u1 else 2",
        "'a' * 10 == u0",
        "9 ** 9 ** 9 > u0",
        "u0 ** 999 > 1",
        "Eq(u0, x=1)",
        "Eq()",
        "open(u0)",
        "u0 >",
        "1.5 > u0",
        "u0 > 1 > u1",
        "(" * 1000 + "u0",
        "u0 + " * MAX_TEXT + "1 > 0",
    ],
    ids=lambda text: text[:20],
)
def test_anything_else_is_refused(text: str) -> None:
    """No part of the text is evaluated."""
    with pytest.raises(NotACondition):
        SizeCondition.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    """Parsing raises `NotACondition` and nothing else."""
    try:
        condition = SizeCondition.parse(text)
    except NotACondition:
        return
    assert condition.text == text


def test_conditions_are_shown_with_the_names_of_sizes() -> None:
    condition = SizeCondition.from_sympy(sympy.Ge(U0 + U1, 3))
    assert condition.with_size_names({"u0": "num_tokens", "u1": "num_logits"}) == "num_logits + num_tokens >= 3" or (
        condition.with_size_names({"u0": "num_tokens", "u1": "num_logits"}) == "num_tokens + num_logits >= 3"
    )
