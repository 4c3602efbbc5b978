"""Counters and gauges of an engine under vLLM's names, for scripts that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecegraph.runner.pooling.engine import PoolingStats
    from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Metric:
    """A named value; metrics with the same name differ in their labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that has only grown since the start."""

    value: int


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Numbers that have only grown since the start, in a fixed order."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A current value."""

    value: float


def engine_metrics(stats: SchedulerStats, num_output_tokens: int, model: str) -> list[Metric]:
    """Return the metrics for `stats` and the `num_output_tokens` generated since the start, under vLLM's names."""
    labels = {"model_name": model, "engine": "0"}
    used = 1 - stats.num_free_blocks / stats.num_blocks
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": used,  # a fraction from 0 to 1, in spite of its name
    }
    counters = {
        "prefix_cache_queries": stats.num_prefix_queries,
        "prefix_cache_hits": stats.num_prefix_hits,
        "num_preemptions": stats.num_preemptions,
        "prompt_tokens": stats.num_prefix_queries,  # each is looked up once, when its request first runs
        "prompt_tokens_cached": stats.num_prefix_hits,
        "generation_tokens": num_output_tokens,
    }
    drafts: list[Metric] = []
    if stats.speculation is not None:
        counters |= {
            "spec_decode_num_drafts": stats.speculation.num_verifications,
            "spec_decode_num_draft_tokens": stats.speculation.num_draft_tokens,
            "spec_decode_num_accepted_tokens": stats.speculation.num_accepted_tokens,
        }
        by_position = list(stats.speculation.num_accepted_by_position)
        reason = stats.speculation.stop_reason
        drafts = [
            Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(labels), by_position),
            Gauge("piecegraph:spec_decode_is_stopped", {**labels, "reason": reason}, float(bool(reason))),
        ]
    own = {"pipeline_steps": stats.num_pipeline_steps, "pipeline_bubbles": stats.num_bubbles}
    return [
        *(Gauge(f"vllm:{name}", dict(labels), float(value)) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", dict(labels), value) for name, value in counters.items()),
        *(Counter(f"piecegraph:{name}", dict(labels), value) for name, value in own.items() if own["pipeline_steps"]),
        *drafts,
    ]


def pooling_metrics(stats: PoolingStats, model: str) -> list[Metric]:
    """Return the metrics of a model that pools, under vLLM's names."""
    labels = {"model_name": model, "engine": "0"}
    return [
        Gauge("vllm:num_requests_running", dict(labels), float(stats.num_running)),
        Gauge("vllm:num_requests_waiting", dict(labels), float(stats.num_waiting)),
        Counter("vllm:prompt_tokens", dict(labels), stats.num_tokens),
    ]
