"""Run a plan step by step, with a hook around each piece and split op: to measure and to check, not to serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecegraph.compiler.building.ready import Parts
from piecegraph.compiler.piece_compilers.protocol import RunPiece
from piecegraph.compiler.splitting.plan import CallStep, PieceStep, Slot

OnPiece = Callable[[PieceStep, RunPiece, tuple[Any, ...]], Sequence[Any]]
"""A hook that takes a piece and its inputs and returns outputs: those of the piece, or replacements."""

OnSplitOp = Callable[[CallStep, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""A hook that takes a split op and its arguments and returns a result: that of the op, or a replacement."""


def run_piece(step: PieceStep, run: RunPiece, inputs: tuple[Any, ...]) -> Sequence[Any]:
    """Run the piece on its inputs and return its outputs: the default `OnPiece`."""
    return run(*inputs)


def call_function(
    step: CallStep, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call the function of `step` on its arguments and return the result: the default `OnSplitOp`."""
    return function(*args, **kwargs)


@torch.no_grad()
def walk(parts: Parts, on_piece: OnPiece = run_piece, on_split_op: OnSplitOp = call_function) -> Any:
    """Return the result of the model, with pieces run by `on_piece` and split ops by `on_split_op`.

    Values live until the end, which takes more memory than a call. Raises what pieces and split ops raise.
    """
    plan = parts.plan
    values: dict[str, Any] = {slot.name: parts.namespace[slot.name] for slot in plan.bound}
    values.update(zip((slot.name for slot in plan.arguments), parts.arguments, strict=True))
    for step in plan.steps:
        if isinstance(step, PieceStep):
            inputs = tuple(values[slot.name] for slot in step.inputs)
            outputs = on_piece(step, parts.pieces[step.unique], inputs)
            values.update(zip((slot.name for slot in step.outputs), outputs, strict=True))
            continue
        args = tuple(substitute_slots(value, values) for value in step.args)
        kwargs = {name: substitute_slots(value, values) for name, value in step.kwargs}
        call = on_split_op if step.is_split_op else call_function
        result = call(step, parts.namespace[step.function], args, kwargs)
        if step.output is not None:
            values[step.output.name] = result
    return parts.build(tuple(substitute_slots(result, values) for result in plan.results))


def substitute_slots(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a (nested) argument with each slot replaced by its value."""
    match value:
        case Slot():
            return values[value.name]
        case tuple() | list():
            return type(value)(substitute_slots(item, values) for item in value)
        case dict():
            return {key: substitute_slots(item, values) for key, item in value.items()}
        case slice():
            return slice(
                substitute_slots(value.start, values),
                substitute_slots(value.stop, values),
                substitute_slots(value.step, values),
            )
    return value
