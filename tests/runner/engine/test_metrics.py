"""Metrics are the engine's counts under vLLM's names."""

from __future__ import annotations

from dataclasses import replace

from piecegraph.runner.engine.metrics import Counter, Gauge, engine_metrics
from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats


def test_counts_and_gauges() -> None:
    stats = SchedulerStats(
        num_running=2,
        num_waiting=1,
        num_free_blocks=6,
        num_blocks=8,
        num_prefix_queries=100,
        num_prefix_hits=32,
        num_preemptions=3,
    )
    metrics = {metric.name: metric for metric in engine_metrics(stats, 7, "a/model")}
    assert not any(name.startswith("piecegraph:") for name in metrics)
    labels = {"model_name": "a/model", "engine": "0"}
    assert metrics["vllm:num_requests_running"] == Gauge("vllm:num_requests_running", labels, 2.0)
    assert metrics["vllm:kv_cache_usage_perc"] == Gauge("vllm:kv_cache_usage_perc", labels, 0.25)
    assert metrics["vllm:prefix_cache_hits"] == Counter("vllm:prefix_cache_hits", labels, 32)
    assert metrics["vllm:generation_tokens"] == Counter("vllm:generation_tokens", labels, 7)
    staged = {each.name: each for each in engine_metrics(replace(stats, num_pipeline_steps=5, num_bubbles=2), 7, "m")}
    bubbles = staged["piecegraph:pipeline_bubbles"]
    assert isinstance(bubbles, Counter) and bubbles.value == 2
