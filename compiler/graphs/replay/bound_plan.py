"""A plan with the values of one bucket, and the execution of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.compiler.building.ready import Parts
from piecegraph.compiler.graphs.replay.prepared_ops import Launch, PreparedOp, ReadMetadata
from piecegraph.compiler.piece_compilers.protocol import RunPiece, run_boxed
from piecegraph.compiler.splitting.passthrough import GraphPiece
from piecegraph.compiler.splitting.plan import CallStep, PieceStep, Plan, Slot, Step
from piecegraph.compiler.splitting.segments import Lifetimes, Segment

Values = dict[str, Any]
"""Values by slot name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPlan:
    """A plan with everything that it needs to run, which is captured for one bucket."""

    plan: Plan
    lifetimes: Lifetimes  # of the plan's values
    pieces: Sequence[RunPiece]
    functions: Mapping[str, Any]  # the stitched module's namespace
    arguments: Sequence[Any]
    prepared_ops: Mapping[str, PreparedOp]  # split ops that are launched; the others are dispatched
    build: Callable[[tuple[Any, ...]], Any]  # makes the caller's result from the plan's results
    before: Callable[[], object] | None = None  # runs first, inside the first graph
    after: Callable[[Any], Any] | None = None  # makes the final result from the caller's, inside the last graph

    @classmethod
    def of(
        cls,
        parts: Parts,
        prepared_ops: Mapping[str, PreparedOp],
        before: Callable[[], object] | None = None,
        after: Callable[[Any], Any] | None = None,
    ) -> BoundPlan:
        """Return the plan of `parts` with prepared ops and the caller's `before` and `after`."""
        return cls(
            plan=parts.plan,
            lifetimes=parts.lifetimes,
            pieces=parts.pieces,
            functions=parts.namespace,
            arguments=parts.arguments,
            prepared_ops=prepared_ops,
            build=parts.build,
            before=before,
            after=after,
        )

    def start(self) -> Values:
        """Return the initial values: bound values and arguments."""
        values = {slot.name: self.functions[slot.name] for slot in self.plan.bound}
        values.update(zip((slot.name for slot in self.plan.arguments), self.arguments, strict=True))
        return values

    def run(self, number: int, step: Step, values: Values) -> None:
        """Run a step that is not a split op, and add its outputs to `values`.

        Such a step is a piece, an item of a result, or arithmetic on sizes, which are fixed in a bucket. Inputs that no
        later step reads are dropped from `values` before a piece runs, so that the piece can free them early.
        """
        if isinstance(step, PieceStep):
            inputs = [values[slot.name] for slot in step.inputs]
            self.lifetimes.drop_after(number, values)
            outputs = run_boxed(self.pieces[step.unique], inputs)
            values.update(zip((slot.name for slot in step.outputs), outputs, strict=True))
        else:
            self.call(step, *arguments_of(step, values), values)

    def call(self, step: CallStep, args: Sequence[Any], kwargs: Mapping[str, Any], values: Values) -> None:
        """Call the function of a step through torch's dispatcher, and add its output to `values`."""
        result = self.functions[step.function](*args, **kwargs)
        if step.output is not None:
            values[step.output.name] = result

    def dispatches_all(self, segment: Segment) -> bool:
        """Return whether a segment is nothing but torch's ops: no code of the caller's, and none of Inductor's."""
        if segment.has_before or segment.has_after or segment.split_ops:
            return False
        pieces = (step for _, step in segment.steps if isinstance(step, PieceStep))
        return all(isinstance(self.pieces[step.unique], GraphPiece) for step in pieces)

    def launch_of(self, step: CallStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch | str:
        """Return the launch that the op's `prepare` made for this call, or why the call is dispatched."""
        prepared = self.prepared_ops.get(step.op)
        if prepared is None:
            return f"{step.op} has no prepare registered"
        if step.output is not None:
            return f"{step.op} returns a value, which a prepared launch could not"
        launch = prepared.prepare(*args, **kwargs)
        if launch is None or isinstance(launch, str):
            return f"{step.op}: {launch or 'its prepare does not take this call'}"
        return launch

    def finish(self, values: Mapping[str, Any]) -> Any:
        """Return the bucket's result from the values of the plan."""
        result = self.build(tuple(filled(result, values) for result in self.plan.results))
        return result if self.after is None else self.after(result)


def arguments_of(step: CallStep, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a call, with values for slots."""
    args = [filled(value, values) for value in step.args]
    return args, {name: filled(value, values) for name, value in step.kwargs}


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a (nested) argument with each slot replaced by its value."""
    if isinstance(value, Slot):
        return values[value.name]
    if value is None or isinstance(value, (int, float, str)):  # most of what is no slot
        return value
    if isinstance(value, tuple | list):
        return type(value)(filled(item, values) for item in value)
    if isinstance(value, dict):
        return {key: filled(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(filled(value.start, values), filled(value.stop, values), filled(value.step, values))
    return value


class MetadataRead:
    """The metadata of one run; each metadata function is called once, on first use."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    def __call__(self, metadata: ReadMetadata) -> Any:
        """Return the value of `metadata()` in this run."""
        if id(metadata) not in self._values:
            self._values[id(metadata)] = metadata()
        return self._values[id(metadata)]
