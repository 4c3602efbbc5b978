"""`SchedulerStats`, what a scheduler has counted, and its present state."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.runner.scheduling.speculation_stats import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges, which describe the present state, and counters since the start."""

    num_running: int  # gauge: requests
    num_waiting: int  # gauge: requests
    num_free_blocks: int  # gauge; a cached block that no request holds is free
    num_blocks: int  # constant
    num_prefix_queries: int  # counter: known tokens of requests, each request when first admitted
    num_prefix_hits: int  # counter: those of `num_prefix_queries` that were found in the prefix cache
    num_preemptions: int  # counter
    num_pipeline_steps: int = 0  # counter: batches that the stages of a pipeline were given; 0 without stages
    num_bubbles: int = 0  # counter: batches that were missing, because no request had a token to compute
    speculation: SpeculationStats | None = None  # counters; None: no speculative decoding
