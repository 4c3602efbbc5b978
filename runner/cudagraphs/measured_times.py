"""The seconds that captured graphs were measured to take, as plain values that dispatch and plans read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.common.engine_config import EngineConfig

MEASURED_UP_TO = 512
"""The most tokens of a graph that is measured. Larger batches are prompts, of which a step takes as long as its tokens
do, so that the smallest graph that holds a batch is the cheapest."""


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """The seconds of a step under each measured graph, and without graphs.

    Graphs that are missing here were not measured: they captured more than `MEASURED_UP_TO` tokens, or adapters.
    """

    graphs: Mapping[tuple[CUDAGraphMode, BatchDescriptor], float] = field(default_factory=dict)
    uncaptured: Mapping[int, float] = field(default_factory=dict)  # by number of tokens, which are not padded

    def uncaptured_seconds(self, num_tokens: int) -> float | None:
        """Return the seconds of a step of `num_tokens` without graphs; None: more tokens than any that was measured.

        Between two measured numbers they grow linearly, and below the smallest they are those of the smallest. A
        measured number that took less than a smaller one counts as the smaller one.
        """
        points = sorted(self.uncaptured.items())
        at = bisect_left(points, (num_tokens,))
        if at == len(points):
            return None
        seconds = [max(each[1] for each in points[: i + 1]) for i in range(at + 1)]  # does not decrease
        if at == 0:
            return seconds[0]
        (below, _), (above, _) = points[at - 1], points[at]
        share = (num_tokens - below) / (above - below)
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def as_record(self) -> dict[str, Any]:
        """Return what JSON can hold, for `from_record`."""
        return {
            "graphs": [
                {
                    "mode": mode.value,
                    "num_tokens": one.num_tokens,
                    "num_reqs": one.num_reqs,
                    "uniform_token_count": one.uniform_token_count,
                    "seconds": seconds,
                }
                for (mode, one), seconds in self.graphs.items()
            ],
            "uncaptured": [[num_tokens, seconds] for num_tokens, seconds in sorted(self.uncaptured.items())],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> MeasuredTimes:
        """Return the times of a record. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        graphs = {}
        for row in record["graphs"]:
            descriptor = BatchDescriptor(
                num_tokens=int(row["num_tokens"]),
                num_reqs=None if row["num_reqs"] is None else int(row["num_reqs"]),
                uniform_token_count=None if row["uniform_token_count"] is None else int(row["uniform_token_count"]),
            )
            graphs[CUDAGraphMode(row["mode"]), descriptor] = float(row["seconds"])
        return cls(graphs, {int(num_tokens): float(seconds) for num_tokens, seconds in record["uncaptured"]})


def why_not_measured(config: EngineConfig) -> str:
    """Return why graphs are not measured although this config asks for it, or ""."""
    for is_so, what in (
        (config.tensor_parallel_size > 1, "several ranks, which must run the same graph in each step"),
        (config.pipeline_parallel_size > 1, "several stages, which must run the same graph in each step"),
        (config.data_parallel_size > 1, "several engines, each of which would measure the others' work"),
        (config.speculative is not None, "speculative_config, whose steps verify drafts of requests that run"),
        (config.enable_lora, "enable_lora, because a step without adapters tells nothing about one with adapters"),
    ):
        if is_so:
            return f"graphs were not measured: measure_graphs is not available with {what}"
    return ""
