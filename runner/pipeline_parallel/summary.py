"""What each stage of a pipeline holds and sends, for `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from piecegraph.runner.pipeline_parallel.stage import Stage, stage_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """One stage; each of its ranks holds as much."""

    first_layer: int
    end_layer: int  # behind the last
    weight_bytes: int  # of one rank
    sent_bytes_per_token: (
        int  # hidden states for the next stage; of the last stage, the token itself, to each other stage
    )


def stages_summary(model: Any, num_stages: int, hidden_bytes: int) -> tuple[StageSummary, ...]:
    """Return the stages of a whole model, whose layers may be divided among ranks; nothing is changed.

    `hidden_bytes`: of one value of the hidden states. Raises what `stage_plan` does.
    """
    found = []
    for index in range(num_stages):
        stage = Stage(index=index, num_stages=num_stages)
        plan = stage_plan(model, stage)
        missing = tuple(f"{name}." for name in plan.missing)
        held = {
            id(parameter): parameter.nbytes
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not name.startswith(missing)
        }
        found.append(
            StageSummary(
                first_layer=plan.layers.start,
                end_layer=plan.layers.stop,
                weight_bytes=sum(held.values()),
                sent_bytes_per_token=8 if stage.is_last else plan.hidden_size * hidden_bytes,
            )
        )
    return tuple(found)
