"""A plan over the values of one bucket, and how each of its steps runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.compiler.graphs.prepared_ops import Launch, PreparedOp, ReadMetadata
from piecegraph.compiler.graphs.stretches import Lifetimes
from piecegraph.compiler.piece_compiler import RunPiece, run_boxed
from piecegraph.compiler.plan import CallStep, PieceStep, Plan, Slot, Step, step_outputs
from piecegraph.compiler.ready import Parts
from piecegraph.compiler.repeated_steps import Repeat

Values = dict[str, Any]
"""By slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A plan with everything it needs to run: what is captured for one bucket."""

    plan: Plan
    lifetimes: Lifetimes  # of the plan's values
    pieces: Sequence[RunPiece]
    functions: Mapping[str, Any]  # the stitched module's namespace
    arguments: Sequence[Any]
    prepared_ops: Mapping[str, PreparedOp]  # split ops that are launched; all others are dispatched
    build: Callable[[tuple[Any, ...]], Any]  # from the plan's results to the caller's
    repeat: Repeat | None  # of the plan's steps
    before: Callable[[], object] | None = None  # runs first, inside the first graph
    after: Callable[[Any], Any] | None = None  # makes of the caller's result another one, inside the last graph

    @classmethod
    def of(
        cls,
        parts: Parts,
        prepared_ops: Mapping[str, PreparedOp],
        before: Callable[[], object] | None = None,
        after: Callable[[Any], Any] | None = None,
    ) -> Bound:
        return cls(
            plan=parts.plan,
            lifetimes=parts.lifetimes,
            pieces=parts.pieces,
            functions=parts.namespace,
            arguments=parts.arguments,
            prepared_ops=prepared_ops,
            build=parts.build,
            repeat=parts.repeat,
            before=before,
            after=after,
        )

    def start(self) -> Values:
        """What steps begin with: bound values and arguments."""
        values = {slot.name: self.functions[slot.name] for slot in self.plan.bound}
        values.update(zip((slot.name for slot in self.plan.arguments), self.arguments, strict=True))
        return values

    def block(self, number: int) -> Sequence[Step]:
        """The steps of one block of `repeat`."""
        assert self.repeat is not None
        begin = self.repeat.first + number * self.repeat.period
        return self.plan.steps[begin : begin + self.repeat.period]

    def skip_blocks(self, ran: int, last: int, values: Values) -> None:
        """As if the blocks behind `ran` up to `last` had run, `last` to the values that `ran` made."""
        assert self.repeat is not None
        for step, its in zip(self.block(last), self.block(ran), strict=True):
            for slot, old in zip(step_outputs(step), step_outputs(its), strict=True):
                if old.name in values:
                    values[slot.name] = values[old.name]
        first, period = self.repeat.first, self.repeat.period
        for number in range(first + (ran + 1) * period, first + (last + 1) * period):
            self.lifetimes.drop_after(number, values)

    def run(self, number: int, step: Step, values: Values) -> None:
        """A piece; or an item of a result, or arithmetic on sizes, which are fixed in a bucket. `values` lose what no
        step after a piece reads as early as the piece does."""
        if isinstance(step, PieceStep):
            inputs = [values[slot.name] for slot in step.inputs]
            self.lifetimes.drop_after(number, values)
            outputs = run_boxed(self.pieces[step.unique], inputs)
            values.update(zip((slot.name for slot in step.outputs), outputs, strict=True))
        else:
            self.call(step, *arguments_of(step, values), values)

    def call(self, step: CallStep, args: Sequence[Any], kwargs: Mapping[str, Any], values: Values) -> None:
        """As torch dispatches it."""
        result = self.functions[step.function](*args, **kwargs)
        if step.output is not None:
            values[step.output.name] = result

    def launch_of(self, step: CallStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch | str:
        """The launch that its `prepare` made for this call, or why the call is dispatched."""
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
        """The bucket's result."""
        result = self.build(tuple(filled(result, values) for result in self.plan.results))
        return result if self.after is None else self.after(result)


def arguments_of(step: CallStep, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Of one call, positional and by name."""
    args = [filled(value, values) for value in step.args]
    return args, {name: filled(value, values) for name, value in step.kwargs}


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A (nested) argument with each slot replaced by its value."""
    if isinstance(value, Slot):
        return values[value.name]
    if isinstance(value, tuple | list):
        return type(value)(filled(item, values) for item in value)
    if isinstance(value, dict):
        return {key: filled(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(filled(value.start, values), filled(value.stop, values), filled(value.step, values))
    return value


class MetadataRead:
    """Metadata of one run, each function called when it is first needed."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    def __call__(self, metadata: ReadMetadata) -> Any:
        if id(metadata) not in self._values:
            self._values[id(metadata)] = metadata()
        return self._values[id(metadata)]
