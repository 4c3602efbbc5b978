"""Experts of every scheme that `quantised_experts` takes, with the same weights in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from piecegraph.passes.kernels.moe.stored_experts import CLAMPED_SWIGLU, Gate, Stored
from piecegraph.passes.ops.quantised import mxfp4
from piecegraph.passes.ops.quantised.experts import gated, rounded
from tests.passes.kernels.quantised.quantised_inputs import Weights, e4m3, integers

SILU = Gate("silu", False, 0.0, 0.0)
CLAMPED = Gate(CLAMPED_SWIGLU, True, 1.702, 7.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertInputs:
    """Operands of `piecegraph::quantised_experts`."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gate_up: Stored
    down: Stored
    floats: tuple[torch.Tensor, torch.Tensor]  # the weights of both in float64
    inputs: str
    gate: Gate

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arguments of the reference."""
        return self.x, self.topk_weights, self.topk_ids, self.gate_up, self.down, self.inputs, self.gate

    @property
    def kernel_operands(self) -> tuple[Any, ...]:
        """The arguments of the kernels, whose input is rounded already."""
        round_inner = partial(rounded, weights=self.down, inputs=self.inputs)
        near = rounded(self.x, self.gate_up, self.inputs)
        return near, self.topk_weights, self.topk_ids, self.gate_up, self.down, self.gate, round_inner

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the op."""
        return (
            self.x, self.topk_weights, self.topk_ids, *self.gate_up[:3], list(self.gate_up.block), *self.down[:3],
            list(self.down.block), self.inputs, *self.gate,
        )  # fmt: skip

    def cuda(self) -> ExpertInputs:
        """The same on a GPU."""

        def moved(stored: Stored) -> Stored:
            bias = None if stored.bias is None else stored.bias.cuda()
            return Stored(stored.values.cuda(), stored.scale.cuda(), bias, stored.block)

        return replace(
            self,
            x=self.x.cuda(),
            topk_weights=self.topk_weights.cuda(),
            topk_ids=self.topk_ids.cuda(),
            gate_up=moved(self.gate_up),
            down=moved(self.down),
        )


def _stored(scheme: str, num_experts: int, rows: int, size: int, dtype: torch.dtype) -> tuple[Stored, torch.Tensor]:
    weights = {
        "int8": lambda: integers(num_experts * rows, size, bits=8, group=0, offset=False, dtype=dtype),
        "int8 in groups": lambda: integers(num_experts * rows, size, bits=8, group=16, offset=False, dtype=dtype),
        "int4": lambda: integers(num_experts * rows, size, bits=4, group=32, offset=True, dtype=dtype),
        "e4m3": lambda: e4m3(num_experts * rows, size, block=(1, 0)),
        "e4m3 in blocks": lambda: e4m3(num_experts * rows, size, block=(16, 32)),
        "mxfp4": lambda: _mxfp4(num_experts * rows, size),
    }[scheme]()
    floats = mxfp4.dequantised(weights.values, weights.scale, torch.float64) if scheme == "mxfp4" else weights.floats()
    values, scale = (each.view(num_experts, -1, *each.shape[1:]) for each in (weights.values, weights.scale))
    if scheme == "int8":
        scale = scale.squeeze(-1)
    bias = torch.randn(num_experts, rows, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return Stored(values, scale, bias, weights.block), floats.view(num_experts, rows, size)


def _mxfp4(num_columns: int, size: int) -> Weights:
    generator = torch.Generator().manual_seed(size)
    values = torch.randint(0, 256, (num_columns, size // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(119, 124, (num_columns, size // 32), generator=generator, dtype=torch.uint8)
    return Weights(values=values, scale=scale, block=(1, 0))


SCHEMES = ("int8", "int8 in groups", "int4", "e4m3", "e4m3 in blocks", "mxfp4")


def expert_inputs(
    scheme: str,
    *,
    num_tokens: int = 5,
    num_experts: int = 4,
    hidden: int = 64,
    size: int = 32,
    inputs: str = "floats",
    gate: Gate = SILU,
    has_bias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> ExpertInputs:
    """Return random operands; each token chooses two experts, and one choice in eight is an expert of another rank."""
    generator = torch.Generator().manual_seed(num_tokens)
    gate_up, gate_up_floats = _stored(scheme, num_experts, 2 * size, hidden, dtype)
    down, down_floats = _stored(scheme, num_experts, hidden, size, dtype)
    weights, ids = torch.randn(num_tokens, num_experts, generator=generator).softmax(-1).topk(2)
    ids.view(-1)[7::8] = num_experts
    return ExpertInputs(
        x=torch.randn(num_tokens, hidden, generator=generator).to(dtype),
        topk_weights=weights,
        topk_ids=ids,
        gate_up=gate_up if has_bias else gate_up._replace(bias=None),
        down=down if has_bias else down._replace(bias=None),
        floats=(gate_up_floats, down_floats),
        inputs=inputs,
        gate=gate,
    )


def exact(given: ExpertInputs) -> torch.Tensor:
    """Return the result in float64, a pair of token and expert at a time; only inputs that are to be rounded are."""
    found = torch.zeros(given.x.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(given.topk_ids.tolist(), given.topk_weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert < given.floats[0].shape[0]:
                row = given.x[token : token + 1]
                inner = gated(given.gate, _linear(row, given, 0, expert))
                found[token] += weight * _linear(inner.to(row.dtype), given, 1, expert)[0]
    return found


def _linear(row: torch.Tensor, given: ExpertInputs, which: int, expert: int) -> torch.Tensor:
    stored = (given.gate_up, given.down)[which]
    product = rounded(row, stored, given.inputs).double() @ given.floats[which][expert].T
    return product if stored.bias is None else product + stored.bias[expert].double()
