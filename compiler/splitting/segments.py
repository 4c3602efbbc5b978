"""The segments of a PIECEWISE bucket, which is cut only at split ops that cannot be part of a graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from piecegraph.compiler.splitting.plan import (
    CallStep,
    PieceStep,
    Plan,
    Slot,
    Step,
    slots_in,
    step_inputs,
    step_outputs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """All steps between two cuts, with the caller's work at either end of the plan: one graph."""

    steps: tuple[tuple[int, Step], ...]  # with their numbers in the plan; split ops among them are patched
    has_before: bool  # the caller's preparation comes first
    has_after: bool  # the caller's work on the results comes last

    @property
    def is_graph(self) -> bool:
        """Return whether the segment launches kernels; arithmetic on sizes and results is fixed in a bucket."""
        return self.has_before or self.has_after or any(isinstance(step, PieceStep) for _, step in self.steps)

    @property
    def split_ops(self) -> tuple[int, ...]:
        """The numbers of the split ops within the segment."""
        return tuple(number for number, step in self.steps if isinstance(step, CallStep) and step.is_split_op)

    @property
    def name(self) -> str:
        """The name of the segment for reports, such as "before, pieces 0-3"."""
        pieces = [step.index for _, step in self.steps if isinstance(step, PieceStep)]
        names = [f"piece {pieces[0]}" if len(pieces) == 1 else f"pieces {pieces[0]}-{pieces[-1]}"] if pieces else []
        return ", ".join([*["before"] * self.has_before, *names, *["after"] * self.has_after])


def split_into_segments(
    plan: Plan, *, has_before: bool, has_after: bool, patched: Collection[int] = ()
) -> tuple[Segment | tuple[int, CallStep], ...]:
    """Return the segments of a plan and, between them, split ops with their numbers.

    `patched`: the numbers of split ops that become part of a segment.
    """
    parts: list[Segment | tuple[int, CallStep]] = []
    steps: list[tuple[int, Step]] = []
    starts_with_before = has_before

    def end(*, has_after: bool) -> None:
        nonlocal starts_with_before
        if steps or starts_with_before or has_after:
            parts.append(Segment(steps=tuple(steps), has_before=starts_with_before, has_after=has_after))
        steps.clear()
        starts_with_before = False

    for number, step in enumerate(plan.steps):
        if isinstance(step, CallStep) and step.is_split_op and number not in patched:
            end(has_after=False)
            parts.append((number, step))
        else:
            steps.append((number, step))
    end(has_after=has_after)
    return tuple(parts)


def num_graphs(plan: Plan, *, has_before: bool, has_after: bool, is_patched: bool = False) -> int:
    """Return the number of graphs of a PIECEWISE bucket. `is_patched`: all split ops are patched into graphs."""
    patched = range(len(plan.steps)) if is_patched else ()
    parts = split_into_segments(plan, has_before=has_before, has_after=has_after, patched=patched)
    return sum(isinstance(part, Segment) and part.is_graph for part in parts)


class Lifetimes:
    """The names of the values that each step of a plan reads and makes, and the last step that reads each of them.

    With it the memory of one layer is reused by the next. It is made once for a plan, which every capture walks.
    """

    def __init__(self, plan: Plan) -> None:
        self._kept = {slot.name for slot in (*plan.arguments, *plan.bound)}
        self._kept |= {result.name for result in plan.results if isinstance(result, Slot)}
        self._results = {slot.name for slot in slots_in(plan.results)}
        self._read = [tuple(dict.fromkeys(slot.name for slot in step_inputs(step))) for step in plan.steps]
        self._made = [tuple(slot.name for slot in step_outputs(step)) for step in plan.steps]
        self._last: dict[str, int] = {}
        for number, (read, made) in enumerate(zip(self._read, self._made, strict=True)):
            self._last.update(dict.fromkeys((*read, *made), number))
        self._ending: dict[int, list[str]] = {}
        for name, number in self._last.items():
            if name not in self._kept:
                self._ending.setdefault(number, []).append(name)

    def drop_after(self, number: int, values: dict[str, object]) -> None:
        """Remove from `values` those that step `number` is the last to read or write."""
        for name in self._ending.get(number, ()):
            values.pop(name, None)

    def read_by(self, number: int) -> tuple[str, ...]:
        """Return the names of the values that step `number` reads, each once."""
        return self._read[number]

    def made_by(self, number: int) -> tuple[str, ...]:
        """Return the names of the values that step `number` makes, in order."""
        return self._made[number]

    def inputs(self, segment: Segment) -> set[str]:
        """Return the names of the values a segment reads that were made before it."""
        read = set().union(*(self._read[number] for number, _ in segment.steps))
        if segment.has_after:
            read |= self._results
        return read.difference(*(self._made[number] for number, _ in segment.steps))

    def outputs(self, segment: Segment) -> tuple[str, ...]:
        """Return the names of the values a segment makes that are read after it, in order."""
        if not segment.steps:
            return ()
        end = segment.steps[-1][0]
        made = (name for number, _ in segment.steps for name in self._made[number])
        return tuple(name for name in made if name in self._kept or self._last[name] > end)
