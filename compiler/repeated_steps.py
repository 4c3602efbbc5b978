"""Where the steps of a plan repeat: the layers of a model that are alike, one after the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from piecegraph.compiler.plan import CallStep, PieceStep, Plan, Slot, Step, slots_in, step_inputs, step_outputs

MAX_PERIOD = 64
"""Steps of a block, at most: a model whose layers are of several kinds in turns repeats all of these together."""

OUTSIDE = ("outside", 0, 0)
"""What a step reads that no block made: it may be another value in each block, as a layer's weights are."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` blocks of `period` steps each, from step `first` of the plan on. They run the same pieces and ops, and
    a step reads of its own block, and of the one ahead, what the step at its place in another block reads of those."""

    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The step after the last block."""
        return self.first + self.period * self.count

    def block_at(self, number: int) -> int | None:
        """The block that begins with step `number`, or `count` for the step after the last; None for any other."""
        block, rest = divmod(number - self.first, self.period)
        return block if rest == 0 and 0 <= block <= self.count else None


class BlockInputs:
    """What the steps of a plan's blocks read."""

    def __init__(self, plan: Plan, repeat: Repeat) -> None:
        numbers = range(repeat.first, repeat.end)
        self._repeat = repeat
        self._split_ops = [
            number
            for number in range(repeat.period)
            if isinstance(step := plan.steps[repeat.first + number], CallStep) and step.is_split_op
        ]
        self.made = frozenset(slot.name for number in numbers for slot in step_outputs(plan.steps[number]))
        """Names of what blocks make."""
        self._all = [tuple(slot.name for slot in step_inputs(plan.steps[number])) for number in numbers]
        self._given = [tuple(name for name in names if name not in self.made) for names in self._all]

    def all(self, number: int) -> tuple[str, ...]:
        """What step `number` of the plan reads, in order."""
        return self._all[number - self._repeat.first]

    def given(self, number: int) -> tuple[str, ...]:
        """What of it no block made: weights, and what is computed once for all."""
        return self._given[number - self._repeat.first]

    def of_split_ops(self, block: int, other: int) -> Iterator[tuple[str, str]]:
        """What split ops of a block read, and what those at the same places of another do."""
        period = self._repeat.period
        for number in self._split_ops:
            yield from zip(self._all[block * period + number], self._all[other * period + number], strict=True)


def find_repeat(plan: Plan) -> Repeat | None:
    """The repeat with most steps, of the shortest blocks; None where no two blocks are alike."""
    wiring = _Wiring(plan)
    kinds = [_kind(step) for step in plan.steps]
    best: Repeat | None = None
    for period in range(1, min(MAX_PERIOD, len(kinds) // 2) + 1):
        begin = 0
        for number in range(period, len(kinds) + 1):
            if number < len(kinds) and kinds[number] == kinds[number - period]:
                continue
            for first in range(begin, min(begin + period, number)):
                while (most := (number - first) // period) > 1 and most * period > _size(best):
                    found = Repeat(first, period, wiring.count_alike(first, period, most))
                    if found.count > 1 and _size(found) > _size(best):
                        best = found
                    first = found.end
            begin = number - period + 1
    return best


def _size(repeat: Repeat | None) -> int:
    """In steps."""
    return 0 if repeat is None else repeat.period * repeat.count


class _Wiring:
    """Which step made what a step reads, and which is the last to read it."""

    def __init__(self, plan: Plan) -> None:
        made_by: dict[str, tuple[int, int]] = {}
        for number, step in enumerate(plan.steps):
            made_by.update((slot.name, (number, output)) for output, slot in enumerate(step_outputs(step)))
        self._inputs = [[made_by.get(slot.name) for slot in step_inputs(step)] for step in plan.steps]
        self._last_reader = [-1] * len(plan.steps)  # of anything the step made
        self._last_reader_of: dict[tuple[int, int], int] = {}  # of one of its outputs
        inputs = [
            *enumerate(self._inputs),
            (len(plan.steps), [made_by.get(slot.name) for slot in slots_in(plan.results)]),
        ]
        for reader, makers in inputs:
            for maker in filter(None, makers):
                self._last_reader[maker[0]] = self._last_reader_of[maker] = reader

    def count_alike(self, first: int, period: int, most: int) -> int:
        """Of `most` blocks from step `first` on, how many are wired like those ahead of them, and leave behind what
        those leave to the next one."""
        count = self._count_wired_alike(first, period, most)
        end = first + count * period
        for (maker, output), reader in self._last_reader_of.items():
            is_left = end - period <= maker < end <= reader  # by the last block, to what comes behind it
            if is_left and self._last_reader_of.get((maker - period, output), -1) < end - period:
                return max(count - 1, 1)
        return count

    def _count_wired_alike(self, first: int, period: int, most: int) -> int:
        ahead = self._reads(first, first, period)
        for block in range(1, most):
            begin = first + block * period
            if max(self._last_reader[begin - period : begin]) >= begin + period:
                return block  # what the block ahead made is needed for longer than such a block leaves it
            reads = self._reads(begin, first, period)
            is_like = all(
                mine == its or (block == 1 and its == OUTSIDE and mine[0] == "ahead")  # of the first nothing is ahead
                for mine, its in zip(reads, ahead, strict=True)
            )
            if not is_like:
                return block
            ahead = reads
        return most

    def _reads(self, begin: int, first: int, period: int) -> list[tuple[str, int, int]]:
        """What the steps of the block that begins there read, told by where in a block it was made."""
        found: list[tuple[str, int, int]] = []
        for number in range(begin, begin + period):
            for maker in self._inputs[number]:
                if maker is None or maker[0] < first:
                    found.append(OUTSIDE)
                elif maker[0] >= begin:
                    found.append(("own", maker[0] - begin, maker[1]))
                elif maker[0] >= begin - period:
                    found.append(("ahead", maker[0] - begin + period, maker[1]))
                else:
                    found.append(("further", number, 0))  # equal to no other's
        return found


def _kind(step: Step) -> Hashable:
    """What steps of different blocks must agree in. Names that a split op is given may differ."""
    if isinstance(step, PieceStep):
        return step.unique, len(step.inputs), len(step.outputs)
    return step.op, step.is_split_op, _form((step.args, step.kwargs), step.is_split_op), step.output is None


def _form(value: Any, may_differ: bool) -> Hashable:
    if isinstance(value, Slot):
        return Slot
    if isinstance(value, tuple | list):
        return type(value), tuple(_form(item, may_differ) for item in value)
    if isinstance(value, Mapping):
        return dict, tuple((key, _form(item, may_differ)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, _form((value.start, value.stop, value.step), may_differ)
    return str if may_differ and isinstance(value, str) else (type(value), value)
