"""A plan run step by step, each piece and split op by whoever watches: to measure and to check, not to serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecegraph.compiler.piece_compiler import RunPiece
from piecegraph.compiler.plan import CallStep, PieceStep, Slot
from piecegraph.compiler.ready import Parts

OnPiece = Callable[[PieceStep, RunPiece, tuple[Any, ...]], Sequence[Any]]
"""Is given a piece and its inputs, and returns its outputs: those of calling it, or others."""

OnSplitOp = Callable[[CallStep, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""Is given a split op and its arguments, and returns what calling it returns, or something else."""


def run_it(step: PieceStep, run: RunPiece, inputs: tuple[Any, ...]) -> Sequence[Any]:
    """The plain `OnPiece`."""
    return run(*inputs)


def call_it(step: CallStep, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The plain `OnSplitOp`."""
    return function(*args, **kwargs)


@torch.no_grad()
def walk(parts: Parts, on_piece: OnPiece = run_it, on_split_op: OnSplitOp = call_it) -> Any:
    """What calling the model over these arguments returns, its pieces run by `on_piece`, its split ops by
    `on_split_op`.

    Values live until the end: this takes more memory than a call. Raises what pieces and split ops raise.
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
        args = tuple(filled(value, values) for value in step.args)
        kwargs = {name: filled(value, values) for name, value in step.kwargs}
        call = on_split_op if step.is_split_op else call_it
        result = call(step, parts.namespace[step.function], args, kwargs)
        if step.output is not None:
            values[step.output.name] = result
    return parts.build(tuple(filled(result, values) for result in plan.results))


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A (nested) argument with each slot replaced by its value."""
    match value:
        case Slot():
            return values[value.name]
        case tuple() | list():
            return type(value)(filled(item, values) for item in value)
        case dict():
            return {key: filled(item, values) for key, item in value.items()}
        case slice():
            return slice(filled(value.start, values), filled(value.stop, values), filled(value.step, values))
    return value
