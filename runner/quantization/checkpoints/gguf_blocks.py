"""The blocks of GGUF files, kept quantised: integers, and the scale and the offset of each group.

The layouts are those of ggml's `block_q8_0`, `block_q4_0`, `block_q4_1`, `block_q4_K`, `block_q5_K` and `block_q6_K`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.quantization.checkpoints.headers import Wanted
from piecegraph.runner.quantization.checkpoints.stored import Parts, check_scale
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.groups import GroupedInt8
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme


class Groups(NamedTuple):
    """Integers `[rows, size]`, and the scale and the offset of each group `[rows, groups]` in float32."""

    values: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None


class _Kind(NamedTuple):
    block_bytes: int
    scheme: Scheme
    block_size: int = 32  # values


KINDS: Mapping[str, _Kind] = {
    "Q8_0": _Kind(34, Scheme(method="int8-groups", group_size=32)),
    "Q4_0": _Kind(18, Scheme(method="int4", group_size=32, has_offset=True)),
    "Q4_1": _Kind(20, Scheme(method="int4", group_size=32, has_offset=True)),
    "Q4_K": _Kind(144, Scheme(method="int4", group_size=32, has_offset=True), 256),
    "Q5_K": _Kind(176, Scheme(method="int8-groups", group_size=32, has_offset=True), 256),
    "Q6_K": _Kind(210, Scheme(method="int8-groups", group_size=16), 256),
}
"""The kinds of blocks that can stay as they are, by ggml's name."""


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """The kind of blocks of each quantised module."""

    quant_method: ClassVar[str] = "gguf"
    marks: ClassVar[tuple[str, ...]] = ("weight_blocks",)
    suffixes: ClassVar[frozenset[str]] = frozenset(("weight_blocks",))
    of_all_experts: ClassVar[tuple[str, ...]] = ()

    kinds: Mapping[str, str]  # by the path of a module
    has_float_head: bool = False  # a head of its own, in floats

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> GgufBlocks:
        """Return what a `quantization_config` with the kinds of `blocks` by module says. Raises `UnsupportedModel`."""
        kinds: Mapping[str, str] = written.get("blocks") or {}
        for path, kind in kinds.items():
            if kind not in KINDS:
                raise UnsupportedModel(
                    f"{path} has blocks of the kind {kind}, which cannot stay as they are here; those that can are "
                    f"{', '.join(KINDS)}. Leave quantization out, so that the file is read into floats."
                )
        return cls(dict(kinds), has_float_head=bool(written.get("has_float_head")))

    def scheme_of(self, path: str, class_name: str) -> Scheme | None:
        """Return the scheme for the blocks of a linear or an embedding; a head without its own shares the latter's."""
        if path not in self.kinds:
            shared = next((kind for name, kind in self.kinds.items() if name.endswith("embed_tokens")), None)
            is_shared = shared is not None and path.endswith("lm_head") and not self.has_float_head
            return KINDS[shared].scheme if is_shared and shared is not None else None
        return KINDS[self.kinds[path]].scheme

    def tensors(
        self, path: str, scheme: Scheme, shape: tuple[int, int], stored: Collection[str]
    ) -> Mapping[str, Wanted]:
        """Return the blocks of a module. Raises `CheckpointError` if its rows are no whole number of them."""
        rows, size = shape
        kind = KINDS[self.kinds[path]]
        if size % kind.block_size:
            raise CheckpointError(
                f"{path} has {size} columns in the model, which blocks of {kind.block_size} in {self.kinds[path]} do "
                "not divide. Check the file."
            )
        return {"weight_blocks": Wanted.one(("U8",), rows, size // kind.block_size * kind.block_bytes)}

    def packed(self, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
        """Return the integers as they are, and scales and offsets as products of the block's and the group's."""
        values, scale, offset = groups_of(parts["weight_blocks"], self.kinds[path])
        check_scale(path, "weight_blocks", scale)
        if offset is not None:
            check_scale(path, "weight_blocks", offset)
        method = METHODS[scheme.method]
        assert isinstance(method, GroupedInt8), method
        return method.stored(values, scale, offset, dtype)


def groups_of(blocks: torch.Tensor, kind: str) -> Groups:
    """Return the integers, scales and offsets of blocks, uint8 `[rows, bytes of a row]`."""
    rows = blocks.shape[0]
    each = blocks.reshape(-1, KINDS[kind].block_bytes)
    values, scale, offset = _READERS[kind](each)
    return Groups(
        values.reshape(rows, -1), scale.reshape(rows, -1), None if offset is None else offset.reshape(rows, -1)
    )


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at `start` of each block, `[blocks, 1]` float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Return the low bits of all bytes of the last dim, and then the high bits."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _q8_0(blocks: torch.Tensor) -> Groups:
    return Groups(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None)


def _q4_0(blocks: torch.Tensor) -> Groups:
    scale = _half(blocks, 0)
    return Groups(_halves(blocks[:, 2:]), scale, -8 * scale)


def _q4_1(blocks: torch.Tensor) -> Groups:
    return Groups(_halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _scales_of_8(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and the eight minimums, 6 bits each, of the 12 bytes of a block."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), 1)
    least = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), 1)
    return scale.float(), least.float()


def _q4_k(blocks: torch.Tensor) -> Groups:
    scale, least = _scales_of_8(blocks[:, 4:16])
    values = _halves(blocks[:, 16:].unflatten(1, (4, 32)))
    return Groups(values, _half(blocks, 0) * scale, -_half(blocks, 2) * least)


def _q5_k(blocks: torch.Tensor) -> Groups:
    """Return values that are 16 too small, and offsets with that back, so that they stay small beside the values."""
    scale, least = _scales_of_8(blocks[:, 4:16])
    low = _halves(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)) & 1
    values = (low | (fifth << 4)).to(torch.int8) - 16
    step = _half(blocks, 0) * scale
    return Groups(values, step, 16 * step - _half(blocks, 2) * least)


def _q6_k(blocks: torch.Tensor) -> Groups:
    low = _halves(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)  # 128 values at a time
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    values = (low | (((high >> shifts) & 3) << 4)).to(torch.int8) - 32
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Groups(values, _half(blocks, 208) * scale, None)


_READERS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
