"""Which values of `quantization` are accepted, and what is said of the others."""

from __future__ import annotations

import pytest

from piecegraph.errors import ConfigError
from piecegraph.runner.quantization.schemes import SCHEMES, check_quantization


def test_schemes_are_accepted() -> None:
    for scheme in (None, *SCHEMES):
        check_quantization(scheme)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("awq", "quantization='awq' is how a checkpoint is stored, which its own config says; leave quantization out."),
        ("bitsandbytes", "quantization='bitsandbytes' is not available here; use quantization='int8' or 'int4' with a"),
        ("int8 ", "quantization='int8 ' is unknown. Did you mean 'int8'?"),
        (8, "quantization=8 is unknown."),
    ],
)
def test_others_are_refused_by_name(scheme: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_quantization(scheme)
    assert str(raised.value).startswith(message)
