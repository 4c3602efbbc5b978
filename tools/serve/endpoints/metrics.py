"""The server's metrics for Prometheus, under vLLM's names where vLLM has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from piecegraph.runner.engine.metrics import Counter, Vector
from piecegraph.runner.engine.metrics import Metric as EngineMetric

if TYPE_CHECKING:
    from piecegraph.runner.common.outputs import RequestOutput
    from piecegraph.runner.common.sampling_params import SamplingParams

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_LONG_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_COMPLETIONS = (1, 2, 5, 10, 20)

_DOCUMENTATION = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions": "Cumulative number of preemptions from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of prefill tokens found in the prefix cache.",
    "generation_tokens": "Number of generation tokens processed.",
    "spec_decode_num_drafts": "Number of spec decoding drafts.",
    "spec_decode_num_draft_tokens": "Number of draft tokens.",
    "spec_decode_num_accepted_tokens": "Number of accepted tokens.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted tokens per draft position.",
}

_OWN_DOCUMENTATION = {
    "piecegraph:start_failures": "Pieces and graphs that could not be compiled or captured while serving.",
    "piecegraph:is_at_full_speed": "1 once everything is compiled and captured.",
    "piecegraph:pipeline_steps": "Batches that the stages of a pipeline were given.",
    "piecegraph:pipeline_bubbles": "Batches that stages were missing because no request had a token to compute.",
    "piecegraph:spec_decode_is_stopped": "1 if drafting has stopped, because it was measured to be slower.",
}
"""Of the metrics that vLLM does not have."""

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _SECONDS),
    "request_time_per_output_token_seconds": ("Histogram of time per output token in seconds per request.", _SECONDS),
    "e2e_request_latency_seconds": ("Histogram of end to end request latency in seconds.", _LONG_SECONDS),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _LONG_SECONDS),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _LONG_SECONDS),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _LONG_SECONDS),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _LONG_SECONDS),
    "request_prompt_tokens": ("Number of prefill tokens processed.", _TOKENS),
    "request_generation_tokens": ("Number of generation tokens processed.", _TOKENS),
    "request_params_n": ("Histogram of the n request parameter.", _COMPLETIONS),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", _TOKENS),
}

_LABELS = ("model_name", "engine")


class _EngineCollector(Collector):
    """The engine's own counters and gauges, read when they are asked for."""

    def __init__(self, read: Callable[[], Sequence[EngineMetric]], model_name: str) -> None:
        self._read, self._model_name = read, model_name

    def collect(self) -> Iterable[Metric]:
        for metric in self._read():
            documentation = {**_DOCUMENTATION, **_OWN_DOCUMENTATION}[metric.name.removeprefix("vllm:")]
            family: CounterMetricFamily | GaugeMetricFamily
            more = {name: value for name, value in metric.labels.items() if name not in _LABELS}
            labels = (*_LABELS, *more)
            if isinstance(metric, Vector):
                family = CounterMetricFamily(metric.name, documentation, labels=(*_LABELS, "position"))
                for position, value in enumerate(metric.values):
                    family.add_metric((self._model_name, "0", str(position)), value)
                yield family
                continue
            if isinstance(metric, Counter):
                family = CounterMetricFamily(metric.name, documentation, labels=labels)
            else:
                family = GaugeMetricFamily(metric.name, documentation, labels=labels)
            family.add_metric((self._model_name, "0", *more.values()), metric.value)  # type: ignore[attr-defined]
            yield family


class ServerMetrics:
    """The metrics of one server, in a registry of its own.

    A request is counted when it ends, so a running one costs nothing here.
    """

    def __init__(self, model_name: str, read_engine: Callable[[], Sequence[EngineMetric]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(read_engine, model_name))
        self._labels = (model_name, "0")
        self._ended = PrometheusCounter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._histograms = {
            name: PrometheusHistogram(
                f"vllm:{name}", documentation, _LABELS, buckets=buckets, registry=self._registry
            ).labels(*self._labels)
            for name, (documentation, buckets) in _HISTOGRAMS.items()
        }
        self._http = PrometheusCounter(
            "http_requests",
            "Total number of requests by method, status and handler.",
            ("method", "status", "handler"),
            registry=self._registry,
        )

    def count_http(self, method: str, status: int, handler: str) -> None:
        """Count a response."""
        self._http.labels(method, str(status), handler).inc()

    def observe(self, output: RequestOutput, params: SamplingParams, num_tokens: Sequence[int], now: float) -> None:
        """Count a finished prompt; `num_tokens` of each completion, `now` monotonic."""
        for completion in output.outputs:
            self._ended.labels(*self._labels, completion.finish_reason or "abort").inc()
        values: dict[str, float] = {
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": sum(num_tokens),
            "request_params_n": params.n,
        }
        if params.max_tokens is not None:
            values["request_params_max_tokens"] = params.max_tokens
        stats = output.metrics
        if stats is not None and stats.scheduled_ts:
            values["e2e_request_latency_seconds"] = now - stats.queued_ts
            values["request_queue_time_seconds"] = stats.scheduled_ts - stats.queued_ts
            values["request_inference_time_seconds"] = stats.last_token_ts - stats.scheduled_ts
            if stats.first_token_ts:
                decode = stats.last_token_ts - stats.first_token_ts
                values["time_to_first_token_seconds"] = stats.first_token_latency
                values["request_prefill_time_seconds"] = stats.first_token_ts - stats.scheduled_ts
                values["request_decode_time_seconds"] = decode
                if stats.num_generation_tokens > 1:
                    values["request_time_per_output_token_seconds"] = decode / (stats.num_generation_tokens - 1)
        for name, value in values.items():
            self._histograms[name].observe(value)

    def observe_pooled(self, num_tokens: int, seconds: float) -> None:
        """Count a text that was pooled `seconds` after it came."""
        self._ended.labels(*self._labels, "stop").inc()
        self._histograms["request_prompt_tokens"].observe(num_tokens)
        self._histograms["e2e_request_latency_seconds"].observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
