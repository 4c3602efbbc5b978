"""Arguments packed as the driver says a kernel's parameters lie."""

from __future__ import annotations

import struct

import pytest

from piecegraph.compiler.common.cuda_driver import KernelParameter
from piecegraph.runner.attention.triton.kernels.node_format import parameter_layout


def test_arguments_lie_where_the_driver_says() -> None:
    """Constants are in no buffer; gaps and Triton's own parameters at the end are zero."""
    types = ["*bf16", "i32", "constexpr", "*i64", "fp32", "constexpr"]
    places = [KernelParameter(*place) for place in ((0, 8), (8, 4), (16, 8), (24, 4), (32, 8), (40, 8))]
    layout = parameter_layout(types, places)
    assert isinstance(layout, struct.Struct)
    packed = layout.pack(0x1122334455667788, -3, 0x99, 0.5)
    assert len(packed) == 48
    assert struct.unpack_from("<Q", packed, 0) == (0x1122334455667788,)
    assert struct.unpack_from("<i", packed, 8) == (-3,)
    assert struct.unpack_from("<Q", packed, 16) == (0x99,)
    assert struct.unpack_from("<f", packed, 24) == (0.5,)
    assert packed[12:16] + packed[28:] == bytes(24)


@pytest.mark.parametrize(
    ("types", "places", "reason"),
    [
        (["i32"], [(0, 8)], "a parameter of 8 bytes is not a 'i'"),
        (["tensordesc"], [(0, 128)], "a parameter of 128 bytes is not a 'tensordesc'"),
        (["i32", "i32"], [(0, 4)], "the kernel has 1 parameters, and Triton passes 2"),
    ],
)
def test_arguments_that_do_not_match_the_parameters_are_refused(
    types: list[str], places: list[tuple[int, int]], reason: str
) -> None:
    assert parameter_layout(types, [KernelParameter(*place) for place in places]) == reason
