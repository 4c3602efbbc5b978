"""What a replay will be made of, as far as a plan can tell before anything is captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from piecegraph.compiler.graphs.prepared_ops import PreparedOp
from piecegraph.compiler.plan import CallStep, Plan

Refusal = Callable[[CallStep], str | None]
"""Why the op's prepare will not take a call, where that is known; None: it will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOpCost:
    """One call of a split op in a PIECEWISE bucket; `ReplayPlan.costs` has the words."""

    op: str
    cost: str
    note: str  # why it costs more than a launch


def expected_costs(
    plan: Plan,
    prepared_ops: Mapping[str, PreparedOp],
    refusal: Refusal = lambda step: None,
    *,
    is_patched: bool = False,
) -> tuple[SplitOpCost, ...]:
    """A row per split op, in order. What a `prepare` decides at capture only `refusal` can tell here.

    `is_patched`: its launches become part of the graph around them (`PatchableLaunch`).
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
