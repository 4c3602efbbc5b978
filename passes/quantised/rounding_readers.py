"""The quantised linears that read a tensor and round it, and the same linears over rows that are rounded already."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.quantised.fp8_linear import FP8_LINEAR
from piecegraph.passes.ops.quantised.int8_inputs_linear import BY_CHANNEL, INT8_INPUTS_LINEAR
from piecegraph.passes.ops.quantised.rounded_linear import ROUNDED_LINEAR
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding of a linear's input: to `stored`, with a scale for each `group` columns."""

    group: int  # `WHOLE_TOKEN`: a scale for each token
    stored: torch.dtype

    def __str__(self) -> str:
        scope = "each token" if self.group == WHOLE_TOKEN else f"groups of {self.group}"
        return f"{str(self.stored).removeprefix('torch.')} for {scope}"

    @property
    def arguments(self) -> tuple[int, torch.dtype]:
        """The last arguments of an op whose result is rounded."""
        return self.group, self.stored


def rounding_of(node: fx.Node) -> Rounding | None:
    """Return how a node rounds its input; None if it is not a linear that rounds its input."""
    if node.target is INT8_INPUTS_LINEAR:
        return Rounding(WHOLE_TOKEN, torch.int8)
    if node.target is FP8_LINEAR and (group := ir.argument(node, 5, "input_group")):
        return Rounding(group, torch.float8_e4m3fn)
    return None


def is_rounded(floats: Sequence[fx.Node]) -> bool:
    """Return whether a linear that rounds its input reads one of `floats`, names of one tensor."""
    return any(rounding_of(reader) is not None and reader.args[0] in floats for node in floats for reader in node.users)


def rounding_readers(floats: Sequence[fx.Node]) -> tuple[Rounding, list[fx.Node]]:
    """Return the one rounding of `floats`, names of one tensor, and the linears that read it.

    Raises `NoMatch` if anything else reads the tensor, and if it is rounded in several ways or with a scale that other
    ranks decide too.
    """
    readers = list(dict.fromkeys(reader for node in floats for reader in node.users))
    roundings: dict[Rounding, fx.Node] = {}
    others = []
    for reader in readers:
        rounding = rounding_of(reader)
        if rounding is None or reader.args[0] not in floats or any(node in reader.args[1:] for node in floats):
            others.append(reader)
            continue
        if (largest := _largest(reader)) is not None:
            raise NoMatch(f"{reader} rounds tokens of which other ranks have parts, by the magnitudes {largest}")
        roundings.setdefault(rounding, reader)
    if others:
        raise NoMatch(f"it is read in floats, too, by {', '.join(map(str, others))}")
    if len(roundings) > 1:
        found = ", ".join(f"{reader} to {rounding}" for rounding, reader in roundings.items())
        raise NoMatch(f"it is rounded in several ways: {found}")
    (rounding,) = roundings
    return rounding, readers


def _largest(linear: fx.Node) -> Any:
    """Return the node of the tokens' largest magnitudes, if a linear takes its scales from one; else None."""
    return ir.argument(linear, 6 if linear.target is FP8_LINEAR else 4, "largest")


def read_rounded(graph: fx.Graph, made: fx.Node, readers: Sequence[fx.Node], dtype: torch.dtype) -> None:
    """Make linears read the first two results of `made`, values and scales; `dtype` is that of their own results."""
    after = made.next
    values, step = (ir.insert_call(graph, after, operator.getitem, made, at) for at in (0, 1))
    for reader in readers:
        weight, scale, bias = (ir.argument(reader, at, name) for at, name in enumerate(("weight", "scale", "bias"), 1))
        if reader.target is FP8_LINEAR:
            block, group = ir.argument(reader, 4, "block"), ir.argument(reader, 5, "input_group")
        else:
            block, group = BY_CHANNEL, WHOLE_TOKEN
        linear = ir.insert_call(graph, reader, ROUNDED_LINEAR, values, step, weight, scale, bias, block, group, dtype)
        reader.replace_all_uses_with(linear)
        graph.erase_node(reader)
