"""The plan: the steps of the stitched module, as data.

A plan names values by slot (a Python identifier) and steps by what they run; it holds no tensor, no
callable and no path. `stitch` writes a module from a plan, and a cache can store one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """A value of the stitched module, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a tensor that are known before it exists. A symbolic size is its expression as text."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class SplitCall:
    """One call of a split op, as the caller's checks see it before anything is compiled.

    `args` follow the call: a `TensorSpec` for a tensor, the text of the expression for a symbolic
    size, the constant itself otherwise; keyword arguments follow as `kwargs`.
    """

    index: int
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceStep:
    """A run of unique piece `unique` over `inputs`; its results become `outputs`."""

    index: int  # among pieces, in order
    unique: int  # index of the unique piece
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStep:
    """A call of `function` between pieces: a split op if `is_split_op`, else a view or arithmetic on sizes.

    `args` and `kwargs` may nest tuples, lists, dicts and slices, with `Slot`s as leaves.
    """

    function: str  # name in the stitched module's namespace
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    output: Slot | None
    is_split_op: bool


Step = PieceStep | CallStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps of a model in order, with its inputs and results.

    `arguments` are given on every call, sizes first; `bound` are values fixed when the model was
    compiled (parameters, buffers, constants, subgraphs a split op takes); `results` may be slots or constants.
    """

    arguments: tuple[Slot, ...]
    bound: tuple[Slot, ...]
    steps: tuple[Step, ...]
    results: tuple[Any, ...]
    written: tuple[Slot, ...] = ()  # arguments and bound tensors whose memory a call changes

    @property
    def piece_steps(self) -> tuple[PieceStep, ...]:
        """The steps that run pieces, in order."""
        return tuple(step for step in self.steps if isinstance(step, PieceStep))

    @property
    def call_steps(self) -> tuple[CallStep, ...]:
        """The calls between pieces, in order."""
        return tuple(step for step in self.steps if isinstance(step, CallStep))

    @property
    def split_steps(self) -> tuple[CallStep, ...]:
        """The calls of split ops, in order."""
        return tuple(step for step in self.call_steps if step.is_split_op)


def slots_in(value: Any) -> Iterator[Slot]:
    """Yield every slot inside a (nested) argument, left to right."""
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from slots_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from slots_in(item)
    elif isinstance(value, slice):
        yield from slots_in((value.start, value.stop, value.step))


def step_inputs(step: Step) -> Iterator[Slot]:
    """Yield the slots that a step reads."""
    if isinstance(step, PieceStep):
        yield from step.inputs
    else:
        yield from slots_in(step.args)
        yield from slots_in(tuple(value for _, value in step.kwargs))


def step_outputs(step: Step) -> tuple[Slot, ...]:
    """Return the slots that a step defines."""
    if isinstance(step, PieceStep):
        return step.outputs
    return (step.output,) if step.output is not None else ()
