"""Values of plans survive JSON, to the bit and to the type."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.common.call_targets import NotStorable
from piecegraph.compiler.splitting.plan import Slot, TensorSpec
from piecegraph.compiler.store.values import as_data, from_data

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from([torch.float16, torch.strided, torch.preserve_format, torch.device("cuda:1"), ..., Slot("x")])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=8,
)


def there_and_back(value: Any) -> Any:
    return from_data(json.loads(json.dumps(as_data(value))))


@given(VALUES)
def test_a_value_survives_json(value: Any) -> None:
    """1, 1.0 and True are three values, and so are a list and a tuple."""
    again = there_and_back(value)
    assert again == value
    assert repr(again) == repr(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324])
def test_floats_are_exact(value: float) -> None:
    assert there_and_back(value).hex() == value.hex()


def test_nan_and_specs() -> None:
    assert math.isnan(there_and_back(math.nan))
    spec = TensorSpec((1, "2*u0"), torch.bfloat16, torch.device("cuda:0"))
    assert there_and_back((spec,)) == (spec,)
    assert there_and_back(torch.Size([1, 2])) == (1, 2)
    assert there_and_back([b"x", b""]) == [b"x", b""]


@pytest.mark.parametrize("value", [object(), torch.ones(1), 1j, {1, 2}, print])
def test_a_value_that_is_not_data_is_refused(value: Any) -> None:
    with pytest.raises(NotStorable, match="not plain data"):
        as_data([value])


@pytest.mark.parametrize(
    "data", [{}, {"unknown": 1}, {"torch": "load"}, {"torch": "float99"}, {"slot": 5}, {"float": 1}]
)
def test_data_that_is_not_a_value_is_refused(data: Any) -> None:
    with pytest.raises(NotStorable):
        from_data(data)
