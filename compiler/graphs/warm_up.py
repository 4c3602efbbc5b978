"""The warm-up of a bucket, so that nothing is loaded, measured or compiled while the bucket is recorded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from piecegraph.compiler.building.capturable import CapturableModel
from piecegraph.compiler.graphs.replay.bound_plan import BoundPlan, MetadataRead, Values, arguments_of
from piecegraph.compiler.graphs.replay.prepared_ops import Kind, PatchableLaunch, ReadMetadata, prepared_ops
from piecegraph.compiler.graphs.replay.step_kinds import kinds_of, step_kind
from piecegraph.compiler.splitting.plan import CallStep, Step


class WarmUpResult(NamedTuple):
    """The result of one warm-up run."""

    result: Any  # the bucket's result
    patchable: frozenset[int]  # numbers of split ops that can be patched; all read the same metadata


def run_plan(bound: BoundPlan, kinds: Mapping[str, Kind] | None = None) -> WarmUpResult:
    """Run the plan step by step, with split ops launched as in a replay; a recording must equal it bitwise.

    With `kinds`, by split op, only the first step of each kind runs (`step_kind`), and its outputs stand for those of
    the other steps: every kernel runs, at a cost that does not grow with depth, and the values of the result are
    meaningless.
    """
    run = _Run(bound)
    ran: dict[Hashable, tuple[int, list[Any]]] = {}  # by kind: number and outputs of the step that ran
    if bound.before is not None:
        bound.before()
    for number, step in enumerate(bound.plan.steps):
        names = bound.lifetimes.made_by(number)
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
    return WarmUpResult(bound.finish(run.values), frozenset(run.patchable))


def call_each_kind(compiled: CapturableModel, *args: Any) -> Any:
    """Run one step of each kind of `compiled(*args)`, which launches every kernel of the call.

    Split ops are dispatched as in a call. The values of the returned result are meaningless.
    """
    return run_plan(BoundPlan.of(compiled.parts(args), prepared_ops={}), kinds_of(prepared_ops())).result


class _Run:
    """The values of one run, and the split ops that can be patched."""

    def __init__(self, bound: BoundPlan) -> None:
        self._bound = bound
        self._read = MetadataRead()
        self._reader: ReadMetadata | None = None  # the metadata function of patchable split ops
        self.values: Values = bound.start()
        self.patchable: set[int] = set()

    def step(self, number: int, step: Step) -> None:
        if isinstance(step, CallStep) and step.is_split_op:
            self._split_op(number, step)
        else:
            self._bound.run(number, step, self.values)

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
