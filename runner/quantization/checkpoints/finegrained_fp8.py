"""Checkpoints of transformers' `FineGrainedFP8Config`: e4m3 weights with a scale for each block."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.quantization.checkpoints.compressed_tensors import fp8_tensors, fp8_weight
from piecegraph.runner.quantization.checkpoints.headers import Wanted
from piecegraph.runner.quantization.checkpoints.stored import Parts
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme


@dataclass(frozen=True, slots=True)
class FineGrainedFp8:
    """The blocks of a checkpoint, and which modules are left alone."""

    quant_method: ClassVar[str] = "fp8"
    marks: ClassVar[tuple[str, ...]] = ("weight_scale_inv",)
    suffixes: ClassVar[frozenset[str]] = frozenset(("weight", "weight_scale_inv", "activation_scale"))
    of_all_experts: ClassVar[tuple[str, ...]] = ()

    scheme: Scheme
    left_alone: tuple[str, ...]

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> FineGrainedFp8:
        """Return what a `quantization_config` says. Raises `UnsupportedModel`, naming what cannot be read."""
        block = written.get("weight_block_size", (128, 128))
        for name, found, is_readable in (
            ("activation_scheme", (scheme := written.get("activation_scheme", "dynamic")), scheme == "dynamic"),
            ("weight_block_size", block, isinstance(block, list | tuple) and len(block) == 2),
            ("scale_fmt", (scales := written.get("scale_fmt", "float")), scales in (None, "float")),
        ):
            if not is_readable:
                raise UnsupportedModel(
                    f"the weights are quantised with 'fp8', whose {name}={found!r} cannot be read here; what can is "
                    "activation_scheme='dynamic' with blocks of weights and float scales. Use such a checkpoint, or an "
                    "unquantised one."
                )
        scheme = Scheme(method="fp8-groups", block_rows=block[0], group_size=block[1])
        return cls(scheme, (*(written.get("modules_to_not_convert") or ()), "lm_head"))

    def scheme_of(self, path: str, class_name: str) -> Scheme | None:
        """Return the scheme of linears; names are left alone as transformers does it, with all below them."""
        is_left = class_name != "Linear" or any(
            re.match(f"{name}\\.", path) or re.match(name, path) or path.endswith(name) for name in self.left_alone
        )
        return None if is_left else self.scheme

    def tensors(
        self, path: str, scheme: Scheme, shape: tuple[int, int], stored: Collection[str]
    ) -> Mapping[str, Wanted]:
        """Return the weight, and the scales of its blocks, which are in float32 or (those of Qwen3) in bfloat16."""
        return fp8_tensors(scheme, shape, "weight_scale_inv", "activation_scale")

    def packed(self, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
        """Return weights and scales as they are stored."""
        return fp8_weight(path, parts["weight"], parts["weight_scale_inv"], scheme, "weight_scale_inv")
