"""The list of methods, and the method for the shape, the dtype and the device of a module's weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from piecegraph.runner.quantization.methods.channels import Int8Channels, Int8Inputs
from piecegraph.runner.quantization.methods.fp8 import Fp8, Fp8Groups, Fp8Tokens
from piecegraph.runner.quantization.methods.groups import GroupedInt4, GroupedInt8, Int4Tiles
from piecegraph.runner.quantization.methods.int4_words import Int4Words
from piecegraph.runner.quantization.methods.linear_method import LinearMethod, Scheme
from piecegraph.runner.quantization.methods.mxfp4 import Mxfp4
from piecegraph.runner.quantization.methods.shard import Shard

_ALL: tuple[LinearMethod, ...] = (
    Int8Channels(),
    Int8Inputs(),
    GroupedInt8(),
    GroupedInt4(),
    Int4Tiles(),
    Int4Words(),
    Fp8(),
    Fp8Tokens(),
    Fp8Groups(),
    Mxfp4(),
)

METHODS: dict[str, LinearMethod] = {method.name: method for method in _ALL}
"""The methods by name."""


def fastest(
    scheme: Scheme, weight: torch.Tensor, *, is_linear: bool, device_type: str, shard: Shard | None = None
) -> Scheme:
    """Return `scheme` with the method whose kernel is the fastest for `weight` on this machine's `device_type`.

    `is_linear`: whether only linears read the weight, and no embedding looks up its rows. `shard`: the part of it that
    the rank holds; None: all of it.
    """
    by_device: dict[str, type[Int4Tiles | Int4Words]] = {"cpu": Int4Tiles, "cuda": Int4Words}
    ordered = by_device.get(device_type)
    if ordered is None or scheme.method != GroupedInt4.name or not is_linear:
        return scheme
    return replace(scheme, method=ordered.name) if ordered.fits(weight, scheme, shard) else scheme
