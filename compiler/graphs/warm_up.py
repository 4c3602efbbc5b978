"""Running a bucket before it is recorded, so that nothing is loaded, measured or compiled while it is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.bound_plan import Bound, MetadataRead, Values, arguments_of
from piecegraph.compiler.graphs.known_blocks import known_blocks
from piecegraph.compiler.graphs.prepared_ops import Kind, PatchableLaunch, ReadMetadata, prepared_ops
from piecegraph.compiler.graphs.step_kinds import kinds_of, step_kind
from piecegraph.compiler.plan import CallStep, Step, step_outputs


class Ran(NamedTuple):
    result: Any  # the bucket's
    patchable: frozenset[int]  # numbers of the split ops that can be patched; all read the same metadata


def run_plan(bound: Bound, kinds: Mapping[str, Kind] | None = None) -> Ran:
    """The stitched module, step by step, split ops launched as a replay would: what a recording of it must
    equal bitwise.

    With `kinds`, of split ops by op, only the first step of each kind runs (`step_kind`), and the others' outputs
    are its outputs: every kernel has run, at a cost that does not grow with depth, and the result's numbers mean
    nothing.
    """
    run = _Run(bound)
    ran: dict[Hashable, tuple[int, list[Any]]] = {}  # by kind: which step, and its outputs
    skipped = _alike_steps(bound) if kinds is not None else range(0)
    if bound.before is not None:
        bound.before()
    for number, step in enumerate(bound.plan.steps):
        if number in skipped:
            if number == skipped.start:
                run.skip_blocks(skipped)
            continue
        names = [slot.name for slot in step_outputs(step)]
        kind = None if kinds is None else step_kind(step, run.values, kinds)
        if kind is not None and kind in ran:
            first, outputs = ran[kind]
            run.values.update(zip(names, outputs, strict=True))
            if first in run.patchable:
                run.patchable.add(number)
        else:
            run.step(number, step)
            if kind is not None:
                ran[kind] = number, [run.values[name] for name in names]
        bound.lifetimes.drop_after(number, run.values)
    return Ran(bound.finish(run.values), frozenset(run.patchable))


def call_each_kind(compiled: CompiledModel, *args: Any) -> Any:
    """All kernels that `compiled(*args)` launches, of each kind of step once; split ops are dispatched, as a call
    does. The result's numbers mean nothing."""
    return run_plan(Bound.of(compiled.parts(args), prepared_ops={}), kinds_of(prepared_ops())).result


def _alike_steps(bound: Bound) -> range:
    """Steps of blocks that take the kernels of the one ahead of them, as a recording before this one found."""
    repeat = bound.repeat
    if repeat is None or repeat.count < 3 or not known_blocks().knows_alike(bound.plan):
        return range(0)
    return range(repeat.first + 2 * repeat.period, repeat.end)


class _Run:
    """One run's values, and what was seen of its split ops."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._read = MetadataRead()
        self._reader: ReadMetadata | None = None  # of what can be patched
        self.values: Values = bound.start()
        self.patchable: set[int] = set()

    def step(self, number: int, step: Step) -> None:
        if isinstance(step, CallStep) and step.is_split_op:
            self._split_op(number, step)
        else:
            self._bound.run(number, step, self.values)

    def skip_blocks(self, steps: range) -> None:
        """All blocks from the third on, which are like the second."""
        repeat = self._bound.repeat
        assert repeat is not None
        self._bound.skip_blocks(1, repeat.count - 1, self.values)
        second = repeat.first + repeat.period
        self.patchable.update(n for n in steps if second + (n - second) % repeat.period in self.patchable)

    def _split_op(self, number: int, step: CallStep) -> None:
        args, kwargs = arguments_of(step, self.values)
        launch = self._bound.launch_of(step, args, kwargs)
        if isinstance(launch, str):
            self._bound.call(step, args, kwargs, self.values)
            return
        metadata = self._bound.prepared_ops[step.op].metadata
        launch(self._read(metadata))
        if isinstance(launch, PatchableLaunch) and launch.unpatchable_reason() is None:
            self._reader = self._reader or metadata
            if metadata is self._reader:
                self.patchable.add(number)
