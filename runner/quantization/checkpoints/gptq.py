"""Checkpoints in the layouts of GPTQ and AWQ: integers of a few bits in int32, a scale and a zero point for each group.

GPTQ packs along the columns of the input, `[size / 8, num_columns]`; AWQ along the output channels, `[size,
num_columns / 8]`, in an order of its own. Both store scales `[num_groups, num_columns]`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.quantization.checkpoints.headers import FLOATS, Form, Wanted
from piecegraph.runner.quantization.checkpoints.stored import Parts, check_scale
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.groups import GroupedInt8
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme
from piecegraph.runner.quantization.methods.packed_integers import unpacked

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ stores each of eight neighbouring channels in an int32: the first in the lowest bits, the second in the
fifth place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """The bits, the groups and the zero points of a GPTQ checkpoint."""

    quant_method: ClassVar[str] = "gptq"
    marks: ClassVar[tuple[str, ...]] = ("qweight",)
    suffixes: ClassVar[frozenset[str]] = frozenset(("qweight", "qzeros", "scales", "g_idx"))
    of_all_experts: ClassVar[tuple[str, ...]] = ()

    bits: int
    scheme: Scheme
    zero_shift: int  # what is added to a stored zero point: 1 in the first version of the format
    has_head: bool
    left_alone: tuple[str, ...] = ()

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Gptq:
        """Return what a `quantization_config` says. Raises `UnsupportedModel`, naming what cannot be read."""
        bits, group_size = written.get("bits"), written.get("group_size", 128)
        file_format = written.get("checkpoint_format") or "gptq"
        for name, found, is_readable in (
            ("bits", bits, bits in (4, 8)),
            ("group_size", group_size, isinstance(group_size, int) and (group_size > 0 or group_size == -1)),
            ("checkpoint_format", file_format, file_format in ("gptq", "gptq_v2")),
            ("dynamic", written.get("dynamic"), not written.get("dynamic")),
            (
                "modules_in_block_to_quantize",
                written.get("modules_in_block_to_quantize"),
                not written.get("modules_in_block_to_quantize"),
            ),
        ):
            if not is_readable:
                raise _unsupported("gptq", name, found, "4 or 8 bits in the formats gptq and gptq_v2")
        method = "int4" if bits == 4 else "int8-groups"
        scheme = Scheme(method=method, group_size=max(int(group_size), 0), has_offset=True)
        return cls(
            bits=int(bits or 0),
            scheme=scheme,
            zero_shift=int(file_format == "gptq"),
            has_head=bool(written.get("lm_head")),
        )

    def scheme_of(self, path: str, class_name: str) -> Scheme | None:
        """Return the scheme of linears, but for the head unless the config says that it is quantised."""
        is_quantised = class_name == "Linear" and (self.has_head or not path.endswith("lm_head"))
        return self.scheme if is_quantised else None

    def tensors(
        self, path: str, scheme: Scheme, shape: tuple[int, int], stored: Collection[str]
    ) -> Mapping[str, Wanted]:
        """Return the tensors of a module, with the group of each column in its place, where the files have that."""
        found = _packed_tensors(path, scheme, shape, self.bits, packs_size=True)
        size = shape[1]
        found["g_idx"] = Wanted(
            forms=(Form(("I32", "I64"), (size,)),),
            is_optional=True,
            values=torch.arange(size) // (scheme.group_size or size),
            what_others_mean=(
                "gives columns in another order to their groups (desc_act=True), which cannot be read here; use a "
                "checkpoint that was made with desc_act=False."
            ),
        )
        return found

    def packed(self, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
        """Return the integers as they are, with `-zero * scale` as the offset of a group."""
        values = unpacked(parts["qweight"], self.bits, 0).t()  # [num_columns, size]
        zeros = unpacked(parts["qzeros"], self.bits, 1)
        return _stored(path, parts, values, zeros.float() + self.zero_shift, scheme, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """The groups of an AWQ checkpoint, and which modules are left alone."""

    quant_method: ClassVar[str] = "awq"
    marks: ClassVar[tuple[str, ...]] = ("qweight",)
    suffixes: ClassVar[frozenset[str]] = frozenset(("qweight", "qzeros", "scales"))
    of_all_experts: ClassVar[tuple[str, ...]] = ()

    scheme: Scheme
    left_alone: tuple[str, ...]

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Awq:
        """Return what a `quantization_config` says. Raises `UnsupportedModel`, naming what cannot be read."""
        bits = written.get("bits", written.get("w_bit"))
        group_size = written.get("group_size", written.get("q_group_size", 128))
        version = str(written.get("version", "gemm")).lower()
        for name, found, is_readable in (
            ("bits", bits, bits == 4),
            ("group_size", group_size, isinstance(group_size, int) and (group_size > 0 or group_size == -1)),
            ("version", version, version == "gemm"),
            ("zero_point", written.get("zero_point", True), written.get("zero_point", True) is True),
        ):
            if not is_readable:
                raise _unsupported("awq", name, found, "4 bits with zero points in the version gemm")
        scheme = Scheme(method="int4", group_size=max(int(group_size), 0), has_offset=True)
        return cls(scheme=scheme, left_alone=(*(written.get("modules_to_not_convert") or ()), "lm_head"))

    def scheme_of(self, path: str, class_name: str) -> Scheme | None:
        """Return the scheme of linears, but for those whose path has a name that is left alone."""
        is_quantised = class_name == "Linear" and not any(name in path for name in self.left_alone)
        return self.scheme if is_quantised else None

    def tensors(
        self, path: str, scheme: Scheme, shape: tuple[int, int], stored: Collection[str]
    ) -> Mapping[str, Wanted]:
        """Return the tensors of a module."""
        return _packed_tensors(path, scheme, shape, 4, packs_size=False)

    def packed(self, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
        """Return the integers in their own order, with `-zero * scale` as the offset of a group."""
        values = unpacked(parts["qweight"], 4, 1, AWQ_ORDER).t()
        zeros = unpacked(parts["qzeros"], 4, 1, AWQ_ORDER)
        return _stored(path, parts, values, zeros.float(), scheme, dtype)


def _packed_tensors(
    path: str, scheme: Scheme, shape: tuple[int, int], bits: int, *, packs_size: bool
) -> dict[str, Wanted]:
    """Return the weights, zero points and scales of a module. `packs_size`: an int32 has weights of one column.

    Raises `CheckpointError` for a shape that int32 or groups do not divide.
    """
    (rows, size), per_word = shape, 32 // bits
    group = scheme.group_size or size
    for what, count, divisor in (
        ("columns", size, group),
        ("columns", size, per_word if packs_size else 1),
        ("rows", rows, per_word),
    ):
        if count % divisor:
            raise CheckpointError(
                f"{path} has {count} {what}, which groups of {divisor} do not divide. Check the checkpoint."
            )
    weights = (size // per_word, rows) if packs_size else (size, rows // per_word)
    return {
        "qweight": Wanted.one(("I32",), *weights),
        "qzeros": Wanted.one(("I32",), size // group, rows // per_word),
        "scales": Wanted.one(FLOATS, size // group, rows),
    }


def _stored(
    path: str,
    parts: Parts,
    values: torch.Tensor,
    zeros: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
) -> PackedWeight:
    """Return the weight `(values - zeros) * scales`; `zeros` are `[num_groups, num_columns]`, as the scales are."""
    scales = parts["scales"].float()
    check_scale(path, "scales", scales)
    method = METHODS[scheme.method]
    assert isinstance(method, GroupedInt8), method
    return method.stored(values, scales.t(), -(zeros * scales).t(), dtype)


def _unsupported(method: str, name: str, found: object, readable: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights are quantised with {method!r}, whose {name}={found!r} cannot be read here; what can are weights "
        f"of {readable}. Use such a checkpoint, or an unquantised one with quantization='int4'."
    )
