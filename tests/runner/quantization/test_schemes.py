"""Which values of `quantization` are accepted, and what is said of the others."""

from __future__ import annotations

import pytest

from piecegraph.errors import ConfigError
from piecegraph.runner.quantization.linear_method import METHODS
from piecegraph.runner.quantization.schemes import SCHEMES, check_quantization


def test_every_scheme_has_a_method() -> None:
    assert SCHEMES.keys() == METHODS.keys()
    for scheme in (None, *SCHEMES):
        check_quantization(scheme)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("awq", "quantization='awq' is not yet available. The schemes that are: 'int8'"),
        ("int8 ", "quantization='int8 ' is unknown. Did you mean 'int8'?"),
        (8, "quantization=8 is unknown."),
    ],
)
def test_others_are_refused_by_name(scheme: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_quantization(scheme)
    assert str(raised.value).startswith(message)
