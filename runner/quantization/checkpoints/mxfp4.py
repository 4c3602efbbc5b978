"""Checkpoints whose experts are in MXFP4, such as those of gpt-oss: blocks of 32 values of 4 bits, and their scales.

Of the experts of a layer, `gate_up_proj_blocks` and `down_proj_blocks` are uint8 `[num_experts, rows, groups, 16]`, two
values in a byte, the first in the low bits; `gate_up_proj_scales` and `down_proj_scales` are uint8 `[num_experts, rows,
groups]`. All other weights are floats. Source: transformers' integration of MXFP4 and the specification that
`passes/ops/quantised/mxfp4.py` follows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.quantization.checkpoints.headers import Wanted
from piecegraph.runner.quantization.checkpoints.stored import Parts
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme

GROUP = 32
NOT_A_NUMBER = 255
"""The scale that stands for no number."""


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """A checkpoint whose experts are in MXFP4, but for those that its config leaves alone."""

    quant_method: ClassVar[str] = "mxfp4"
    marks: ClassVar[tuple[str, ...]] = ()
    suffixes: ClassVar[frozenset[str]] = frozenset()
    of_all_experts: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")

    left_alone: tuple[str, ...] = ()

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Mxfp4Experts:
        """Return what a `quantization_config` says."""
        return cls(tuple(written.get("modules_to_not_convert") or ()))

    def scheme_of(self, path: str, class_name: str) -> Scheme | None:
        """Return the scheme of the linears of experts; names are left alone as transformers does it."""
        is_expert = class_name == "Linear" and ".experts." in path
        is_left = any(re.match(f"{name}\\.", path) or re.match(name, path) for name in self.left_alone)
        return Scheme(method="mxfp4", group_size=GROUP) if is_expert and not is_left else None

    def tensors(
        self, path: str, scheme: Scheme, shape: tuple[int, int], stored: Collection[str]
    ) -> Mapping[str, Wanted]:
        """Return the blocks and scales of one expert's projection; groups divide its size (`Mxfp4.empty`)."""
        rows, size = shape
        return {
            "_blocks": Wanted.one(("U8",), rows, size // GROUP, GROUP // 2),
            "_scales": Wanted.one(("U8",), rows, size // GROUP),
        }

    def packed(self, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
        """Return the blocks and scales of one expert's projection as they are stored."""
        blocks, scale = (parts[name] for name in self.of_all_experts)
        if bool((scale == NOT_A_NUMBER).any()):
            raise CheckpointError(f"{path}_scales has values that are not numbers. Copy the file again.")
        return PackedWeight(values=blocks.flatten(1), scale=scale)
