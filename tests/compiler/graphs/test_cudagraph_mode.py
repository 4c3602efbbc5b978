"""Modes: two are configured only, three are what a batch runs under."""

from __future__ import annotations

import pytest

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "decode", "mixed"),
    [
        ("none", "NONE", "NONE"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("full", "FULL", "FULL"),
        ("FULL_DECODE_ONLY", "FULL", "NONE"),
        ("full_and_piecewise", "FULL", "PIECEWISE"),
    ],
)
def test_a_mode_resolves_for_decode_and_for_the_rest(name: str, decode: str, mixed: str) -> None:
    mode = CUDAGraphMode.parse(name)
    assert (mode.decode_mode.name, mode.mixed_mode.name) == (decode, mixed)


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"cudagraph_mode='picewise' is unknown\. Did you mean 'PIECEWISE'"):
        CUDAGraphMode.parse("picewise")
