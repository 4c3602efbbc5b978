"""What the captures of one call of `capture` tell each other of the blocks that repeat, and tell its caller."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from piecegraph.compiler.graphs.copied_nodes import Memory
from piecegraph.compiler.graphs.step_kinds import value_kind
from piecegraph.compiler.plan import Plan
from piecegraph.compiler.repeated_steps import BlockInputs, Repeat

LIBRARY_ALIGNMENT = 256
"""Bytes: of more of an address no matmul of the library is chosen by. To warm one up less is enough (`step_kinds`)."""


class Copied(NamedTuple):
    """What became of the blocks of one recording."""

    num_blocks: int  # that were copied
    num_alike: int
    reason: str | None  # why none was


class Described(NamedTuple):
    """A value that a block has of its own."""

    kind: Hashable  # `value_kind`, and of a tensor its alignment as a library may ask for it
    memory: Memory | None  # of a tensor

    @classmethod
    def of(cls, value: Any) -> Described:
        if not isinstance(value, torch.Tensor):
            return cls(value_kind(value), None)
        if value.device.type != "cuda":
            return cls(value_kind(value), Memory.of(value))
        address = value.data_ptr() | LIBRARY_ALIGNMENT
        return cls((value_kind(value), address & -address), Memory.of(value))


Fact = Described | str
"""Of a block: a value that it has in every bucket, or the name of one that differs from bucket to bucket."""


class KnownBlocks:
    """Of one model: its weights stay where they are while it lives."""

    def __init__(self, *, may_copy: bool = True) -> None:
        self.may_copy = may_copy
        self.are_alike = False
        """Every block from the second on takes the kernels of the second: in the plan that `inputs` was asked for."""
        self.told: list[Copied] = []
        """What the bucket that is captured now copied; its recordings add to it."""
        self.blocks: dict[int, list[Fact]] = {}
        """What differs from block to block, of each that was copied."""
        self._inputs: tuple[Plan, BlockInputs] | None = None
        self._described: dict[int, tuple[Any, Described]] = {}  # by id, with the value, which so keeps it

    @contextmanager
    def used(self) -> Iterator[None]:
        """`known_blocks` are these, and nothing is told yet."""
        self.told = []
        token = _known.set(self)
        try:
            yield
        finally:
            _known.reset(token)

    def describe(self, value: Any, *, stays: bool = False) -> Described:
        """`stays`: the value is there in all captures, in the same place, so that it need not be looked at again."""
        found = self._described.get(id(value))
        if found is not None:
            return found[1]
        described = Described.of(value)
        if stays:
            self._described[id(value)] = (value, described)
        return described

    def inputs(self, plan: Plan, repeat: Repeat) -> BlockInputs:
        """What is known is of one plan: asked for another's, as of a second model in one step, it is forgotten."""
        if self._inputs is None or self._inputs[0] is not plan:
            self._inputs = (plan, BlockInputs(plan, repeat))
            self.are_alike = False
            self.blocks.clear()
        return self._inputs[1]

    def knows_alike(self, plan: Plan) -> bool:
        """`are_alike`, of this plan."""
        return self.are_alike and self._inputs is not None and self._inputs[0] is plan


_known: ContextVar[KnownBlocks | None] = ContextVar("known_blocks", default=None)


def known_blocks() -> KnownBlocks:
    """Those of the capture that runs; outside of one nothing is known."""
    return _known.get() or KnownBlocks()
