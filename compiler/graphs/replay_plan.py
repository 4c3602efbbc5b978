"""What a captured bucket becomes: a flat list of steps with nothing left to look up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from piecegraph.compiler.graphs.recorder import Recorder, Recording
from piecegraph.compiler.piece_compiler import RunPiece
from piecegraph.compiler.plan import CallStep, PieceStep, Plan, Slot, step_inputs, step_outputs


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One call at replay, and what it costs beyond a graph launch."""

    run: Callable[[], None]
    name: str
    cost: str  # "graph", "dispatch" (a split op called as it is) or "dispatch + copy" (it returns instead of writing)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A bucket, ready to replay: run the steps in order, then read `results`."""

    steps: tuple[ReplayStep, ...]
    results: tuple[Any, ...]
    recordings: tuple[Recording, ...]


def run_plan(
    plan: Plan, pieces: Sequence[RunPiece], functions: Mapping[str, Any], arguments: Sequence[Any]
) -> tuple[Any, ...]:
    """The stitched module, step by step: what a capture warms up with, and what it must equal bitwise."""
    values = _start(plan, functions, arguments)
    for step in plan.steps:
        if isinstance(step, PieceStep):
            outputs = pieces[step.unique](*(values[slot.name] for slot in step.inputs))
            values.update(zip((slot.name for slot in step.outputs), outputs, strict=True))
        else:
            _call(step, functions, values)
    return tuple(_filled(result, values) for result in plan.results)


def record_plan(
    plan: Plan,
    pieces: Sequence[RunPiece],
    functions: Mapping[str, Any],
    arguments: Sequence[Any],
    recorder: Recorder,
) -> ReplayPlan:
    """Record every piece over `arguments` and call everything between pieces once, in order.

    Values are dropped after their last reader, as the stitched module does, so that one bucket's
    layers, and buckets captured later, use the same memory; steps keep addresses only. Raises
    whatever a piece or split op raises, with everything recorded so far released.
    """
    values = _start(plan, functions, arguments)
    kept = {slot.name for slot in (*plan.arguments, *plan.bound)}
    last_use = {slot.name: i for i, step in enumerate(plan.steps) for slot in (*step_inputs(step), *step_outputs(step))}
    steps: list[ReplayStep] = []
    recordings: list[Recording] = []
    try:
        for number, step in enumerate(plan.steps):
            if isinstance(step, PieceStep):
                inputs = [values[slot.name] for slot in step.inputs]
                recording = recorder.record(partial(pieces[step.unique], *inputs))
                recordings.append(recording)
                steps.append(ReplayStep(recording.replay, f"piece {step.index}", "graph"))
                values.update(zip((slot.name for slot in step.outputs), recording.outputs, strict=True))
                recordings[-1] = Recording(recording.replay, (), recording.release)
            elif step.is_split_op:
                steps.append(_record_split_op(step, functions, values, recorder))
            else:
                _call(step, functions, values)  # an item of a result, or arithmetic on sizes: fixed in a bucket
            for slot in {*step_inputs(step), *step_outputs(step)}:
                if last_use[slot.name] == number and slot.name not in kept and not _is_result(plan, slot):
                    values.pop(slot.name, None)
        results = tuple(recorder.weak(_filled(result, values)) for result in plan.results)
    except BaseException:
        for recording in recordings:
            recording.release()
        raise
    return ReplayPlan(tuple(steps), results, tuple(recordings))


def _record_split_op(
    step: CallStep, functions: Mapping[str, Any], values: dict[str, Any], recorder: Recorder
) -> ReplayStep:
    """Call a split op once, and bind it to the addresses of this bucket for every replay."""
    function = functions[step.function]
    weak = {slot.name: recorder.weak(values[slot.name]) for slot in step_inputs(step)}
    args = [_filled(value, weak) for value in step.args]
    kwargs = {name: _filled(value, weak) for name, value in step.kwargs}
    result = function(*args, **kwargs)
    if step.output is None or result is None:
        return ReplayStep(partial(_discard, function, args, kwargs), step.op, "dispatch")
    values[step.output.name] = result
    kept = result

    def run() -> None:
        for target, value in zip(_tensors(kept), _tensors(function(*args, **kwargs)), strict=True):
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)

    return ReplayStep(run, step.op, "dispatch + copy")


def _discard(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    function(*args, **kwargs)


def _start(plan: Plan, functions: Mapping[str, Any], arguments: Sequence[Any]) -> dict[str, Any]:
    values = {slot.name: functions[slot.name] for slot in plan.bound}
    values.update(zip((slot.name for slot in plan.arguments), arguments, strict=True))
    return values


def _call(step: CallStep, functions: Mapping[str, Any], values: dict[str, Any]) -> None:
    args = [_filled(value, values) for value in step.args]
    result = functions[step.function](*args, **{name: _filled(value, values) for name, value in step.kwargs})
    if step.output is not None:
        values[step.output.name] = result


def _is_result(plan: Plan, slot: Slot) -> bool:
    return slot in plan.results


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A (nested) argument with each slot replaced by its value."""
    match value:
        case Slot():
            return values[value.name]
        case tuple() | list():
            return type(value)(_filled(item, values) for item in value)
        case dict():
            return {key: _filled(item, values) for key, item in value.items()}
        case slice():
            return slice(_filled(value.start, values), _filled(value.stop, values), _filled(value.step, values))
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple | list) else []
