"""The expected cost of the split ops of a replay, derived from a plan before anything is captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from piecegraph.compiler.graphs.replay.prepared_ops import PreparedOp
from piecegraph.compiler.splitting.plan import CallStep, Plan

Refusal = Callable[[CallStep], str | None]
"""Returns the known reason why the op's `prepare` will not take a call; None if it will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOpCost:
    """The cost of one call of a split op in a PIECEWISE bucket, in the words of `ReplayStep.cost`."""

    op: str
    cost: str
    note: str  # why the call costs more than a launch


def expected_costs(
    plan: Plan,
    prepared_ops: Mapping[str, PreparedOp],
    refusal: Refusal = lambda step: None,
    *,
    is_patched: bool = False,
) -> tuple[SplitOpCost, ...]:
    """Return the expected cost of each split op, in order.

    A `prepare` decides only at capture; `refusal` predicts its decision. `is_patched` says that launches become part of
    the surrounding graph (`PatchableLaunch`).
    """
    return tuple(_expected_cost(step, prepared_ops, refusal, is_patched) for step in plan.split_steps)


def _expected_cost(
    step: CallStep, prepared_ops: Mapping[str, PreparedOp], refusal: Refusal, is_patched: bool
) -> SplitOpCost:
    if step.op not in prepared_ops:
        note: str | None = f"{step.op} has no prepare registered"
    elif step.output is not None:
        note = f"{step.op} returns a value, which a prepared launch could not"
    else:
        refused = refusal(step)
        note = None if refused is None else f"{step.op}: {refused}"
    if note is None:
        return SplitOpCost(op=step.op, cost="patch" if is_patched else "launch", note="")
    return SplitOpCost(op=step.op, cost="dispatch" if step.output is None else "dispatch + copy", note=note)
