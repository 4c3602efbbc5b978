"""Checkpoints of the library compressed-tensors: which ones can be read, and what their modules store.

The layouts follow its compressors `pack-quantized`, `int-quantized` and `float-quantized`, and the schemes those of its
presets W8A16, W4A16, W8A8, FP8_DYNAMIC and FP8_BLOCK.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.quantization.checkpoints.cache_scales import check_cache_scheme
from piecegraph.runner.quantization.checkpoints.headers import FLOATS, NOT_USED, Form, Wanted
from piecegraph.runner.quantization.checkpoints.stored import Parts, check_scale
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.groups import GroupedInt8
from piecegraph.runner.quantization.methods.linear_method import Block, PackedWeight, Scheme
from piecegraph.runner.quantization.methods.packed_integers import unpacked

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    targets: tuple[str, ...]
    scheme: Scheme
    num_bits: int
    is_symmetric: bool
    has_one_scale: bool  # for a whole weight


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Which modules of a checkpoint are quantised, and how. An entry is the name of a module or of a class, or `re:`
    and a pattern for the start of a module's name."""

    quant_method: ClassVar[str] = "compressed-tensors"
    marks: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    suffixes: ClassVar[frozenset[str]] = frozenset(
        ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale")
    )
    of_all_experts: ClassVar[tuple[str, ...]] = ()

    groups: tuple[_Group, ...]
    ignore: tuple[str, ...]

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> CompressedTensors:
        """Return what a `quantization_config` says. Raises `UnsupportedModel`, naming what cannot be read."""
        groups: Mapping[str, Mapping[str, Any]] = written.get("config_groups") or {}
        for name, found, is_readable in (
            ("format", written.get("format"), written.get("format") in FORMATS),
            ("sparsity_config", written.get("sparsity_config"), not written.get("sparsity_config")),
            ("transform_config", written.get("transform_config"), not written.get("transform_config")),
            ("config_groups", list(groups), len(groups) >= 1),
        ):
            if not is_readable:
                raise _unsupported(name, found)
        check_cache_scheme(written.get("kv_cache_scheme"))
        for group in groups.values():
            if group.get("output_activations"):
                raise _unsupported("output_activations", group["output_activations"])
            if (found := group.get("format")) not in (None, *FORMATS):
                raise _unsupported("format", found)
        return cls(tuple(map(_group, groups.values())), tuple(written.get("ignore") or ()))

    def scheme_of(self, path: str, class_name: str) -> Scheme | None:
        """Return the scheme of the first group that has the module; only plain linears can have one."""
        group = self._group_of(path, class_name)
        return None if group is None else group.scheme

    def tensors(
        self, path: str, scheme: Scheme, shape: tuple[int, int], stored: Collection[str]
    ) -> Mapping[str, Wanted]:
        """Return the tensors of a module; integers are packed, or in int8 each."""
        group = self._group_of(path, "Linear")
        assert group is not None, path
        if scheme.method.startswith("fp8"):
            return fp8_tensors(scheme, shape, "weight_scale", "input_scale", has_one_scale=group.has_one_scale)
        rows, size = shape
        if scheme.group_size and size % scheme.group_size:
            raise CheckpointError(f"{path} has {size} columns, which groups of {scheme.group_size} do not divide.")
        groups = size // scheme.group_size if scheme.group_size else 1
        found = {"weight_scale": Wanted.one(FLOATS, rows, groups)}
        if "weight" in stored:
            found["weight"] = Wanted.one(("I8",), rows, size)
        else:
            found["weight_packed"] = Wanted.one(("I32",), rows, -(-size * group.num_bits // 32))
            found["weight_shape"] = Wanted(
                forms=(Form(("I64", "I32"), (2,)),),
                values=torch.tensor(shape),
                what_others_mean=f"is not [{rows}, {size}]. Check that config.json belongs to these weights.",
            )
        plain = Form(("I8",), (rows, groups))
        if group.is_symmetric:
            found["weight_zero_point"] = Wanted(
                forms=(plain,),
                is_optional=True,
                values=torch.zeros(rows, groups, dtype=torch.long),
                what_others_mean="is not zero, and the config says symmetric=True. Check that they belong together.",
            )
        else:
            packed = Form(("I32",), (-(-rows * group.num_bits // 32), groups))
            found["weight_zero_point"] = Wanted(forms=(packed, plain))
        found["weight_g_idx"] = Wanted(
            forms=(Form(("I32", "I64"), (size,)),),
            is_optional=True,
            values=torch.arange(size) // (scheme.group_size or size),
            what_others_mean=(
                "gives columns in another order to their groups (actorder), which cannot be read here; use a "
                "checkpoint without it."
            ),
        )
        return {**found, "input_scale": NOT_USED}

    def packed(self, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
        """Return integers and scales as they are stored, the latter in `dtype`; float8 keeps its scales in float32."""
        group = self._group_of(path, "Linear")
        assert group is not None, path
        scale = parts["weight_scale"]
        if scheme.method.startswith("fp8"):
            return fp8_weight(path, parts["weight"], scale, scheme, "weight_scale")
        check_scale(path, "weight_scale", scale)
        if scheme.method in ("int8", "int8-inputs"):
            stored = parts.get("weight")
            signed = _signed(self._integers(parts, group)) if stored is None else stored
            return PackedWeight(values=signed, scale=scale[:, 0].to(dtype).contiguous())
        values = self._integers(parts, group)
        zero = float(1 << (group.num_bits - 1))
        offset = -zero * scale.float()
        if not group.is_symmetric:
            stored = parts["weight_zero_point"]
            if stored.dtype is torch.int32:
                zeros = unpacked(stored, group.num_bits, 0)[: values.shape[0]].float()
            else:
                zeros = stored.float() + zero
            offset = -zeros * scale.float()
        elif group.num_bits == 8:
            values, offset = _signed(values), None  # type: ignore[assignment]
        method = METHODS[scheme.method]
        assert isinstance(method, GroupedInt8), method
        return method.stored(values, scale.float(), offset, dtype)

    def _group_of(self, path: str, class_name: str) -> _Group | None:
        if class_name != "Linear" or _is_in(self.ignore, path, class_name):
            return None
        return next((group for group in self.groups if _is_in(group.targets, path, class_name)), None)

    def _integers(self, parts: Parts, group: _Group) -> torch.Tensor:
        """Return the integers of a module, each `2**(num_bits - 1)` too large, as uint8 `[rows, columns]`."""
        half = 1 << (group.num_bits - 1)
        if "weight" in parts:  # int-quantized
            stored = parts["weight"].view(torch.uint8)
            return stored ^ 128 if half == 128 else stored + half
        _, size = parts["weight_shape"].tolist()
        return unpacked(parts["weight_packed"], group.num_bits, 1)[:, :size].contiguous()


def _signed(values: torch.Tensor) -> torch.Tensor:
    """Return uint8 values that are 128 too large as int8, without a copy in a wider dtype."""
    return (values ^ 128).view(torch.int8)


def fp8_tensors(
    scheme: Scheme, shape: tuple[int, int], scale: str, not_used: str, *, has_one_scale: bool = False
) -> Mapping[str, Wanted]:
    """Return the tensors of a float8 weight with one scale for each channel or block, or for the whole.

    `scale` and `not_used` are what the format calls the scales of weights and those of inputs.
    """
    rows, size = shape
    if scheme.block_rows == 1:
        shapes: tuple[tuple[int, ...], ...] = ((1,), (1, 1), ()) if has_one_scale else ((rows, 1), (rows,))
    else:
        shapes = ((-(-rows // scheme.block_rows), -(-size // scheme.group_size)),)
    scales = Wanted(forms=tuple(Form(FLOATS, each) for each in shapes))
    return {"weight": Wanted.one(("F8_E4M3",), rows, size), scale: scales, not_used: NOT_USED}


def fp8_weight(path: str, values: torch.Tensor, scale: torch.Tensor, scheme: Scheme, name: str) -> PackedWeight:
    """Return a float8 weight whose tensors are those of `fp8_tensors`. Raises `CheckpointError` for no numbers."""
    rows, _ = values.shape
    block: Block = (scheme.block_rows, scheme.group_size)
    check_scale(path, name, scale)
    if bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise CheckpointError(f"{path}.weight has values that are not numbers. Copy the file again.")
    if scheme.block_rows == 1:
        if scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(rows, 1)
        elif scale.ndim == 1:
            scale = scale.unsqueeze(1)
    return PackedWeight(values=values, scale=scale.float().contiguous(), block=block)


def _is_in(entries: Sequence[str], path: str, class_name: str) -> bool:
    return any(
        re.match(entry[3:], path) is not None if entry.startswith("re:") else entry in (path, class_name)
        for entry in entries
    )


def _group(written: Mapping[str, Any]) -> _Group:
    """Return one of the `config_groups`. Raises `UnsupportedModel`."""
    weights: Mapping[str, Any] = written.get("weights") or {}
    inputs: Mapping[str, Any] = written.get("input_activations") or {}
    kind, bits, strategy = (weights.get(name) for name in ("type", "num_bits", "strategy"))
    if kind == "float" and bits == 8:
        scheme = _float_scheme(weights, inputs)
    elif kind == "int" and bits in (4, 8):
        scheme = _int_scheme(weights, inputs)
    else:
        raise _unsupported(
            "weights.type" if kind not in ("int", "float") else "weights.num_bits", kind if bits == 8 else bits
        )
    if weights.get("dynamic"):
        raise _unsupported("weights.dynamic", weights["dynamic"])
    if weights.get("actorder") not in (None, "weight", "static"):
        raise _unsupported("weights.actorder", weights["actorder"])
    assert strategy is not None
    return _Group(
        targets=tuple(written.get("targets") or ()),
        scheme=scheme,
        num_bits=int(bits),
        is_symmetric=bool(weights.get("symmetric", True)),
        has_one_scale=strategy == "tensor",
    )


def _int_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    bits, strategy, is_symmetric = weights["num_bits"], weights.get("strategy"), weights.get("symmetric", True)
    if strategy not in ("channel", "group"):
        raise _unsupported("weights.strategy", strategy)
    group_size = weights.get("group_size") if strategy == "group" else 0
    if not isinstance(group_size, int) or group_size < 0 or (strategy == "group" and group_size == 0):
        raise _unsupported("weights.group_size", group_size)
    if inputs:
        if bits != 8 or strategy != "channel" or not is_symmetric:
            raise _unsupported("input_activations", inputs)
        _check_inputs(inputs, kind="int", strategies=("token",))
        return Scheme(method="int8-inputs")
    if bits == 8 and strategy == "channel" and is_symmetric:
        return Scheme(method="int8")
    if bits == 8:
        return Scheme(method="int8-groups", group_size=group_size, has_offset=not is_symmetric)
    return Scheme(method="int4", group_size=group_size, has_offset=True)


def _float_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    strategy = weights.get("strategy")
    if not weights.get("symmetric", True):
        raise _unsupported("weights.symmetric", False)
    if strategy in ("tensor", "channel"):
        if not inputs:
            return Scheme(method="fp8")
        _check_inputs(inputs, kind="float", strategies=("token",))
        return Scheme(method="fp8-tokens")
    block = weights.get("block_structure")
    if strategy != "block" or not isinstance(block, list | tuple) or len(block) != 2:
        raise _unsupported("weights.strategy", strategy)
    if not inputs:
        return Scheme(method="fp8", block_rows=block[0], group_size=block[1])
    _check_inputs(inputs, kind="float", strategies=("group",))
    if inputs.get("group_size") != block[1]:
        raise _unsupported("input_activations.group_size", inputs.get("group_size"))
    return Scheme(method="fp8-groups", block_rows=block[0], group_size=block[1])


def _check_inputs(inputs: Mapping[str, Any], *, kind: str, strategies: tuple[str, ...]) -> None:
    for name, wanted in (("type", (kind,)), ("num_bits", (8,)), ("strategy", strategies), ("dynamic", (True,))):
        if inputs.get(name) not in wanted:
            raise _unsupported(f"input_activations.{name}", inputs.get(name))
    if not inputs.get("symmetric", True):
        raise _unsupported("input_activations.symmetric", False)


def _unsupported(name: str, found: object) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights are quantised with 'compressed-tensors', whose {name}={found!r} cannot be read here; what can "
        "are the schemes of the presets W8A16, W4A16, W8A8, FP8_DYNAMIC and FP8_BLOCK, in the formats "
        f"{', '.join(FORMATS)}. "
        "Use such a checkpoint, or an unquantised one with quantization='int8'."
    )
