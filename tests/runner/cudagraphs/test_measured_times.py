"""Measured seconds as plain values, and the configs for which nothing is measured."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.cudagraphs.measured_times import MeasuredTimes, why_not_measured

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def test_seconds_without_graphs_grow_linearly_between_measured_sizes() -> None:
    times = MeasuredTimes(uncaptured={4: 1.0, 8: 2.0})
    assert [times.uncaptured_seconds(n) for n in (1, 4, 6, 8, 9)] == [1.0, 1.0, 1.5, 2.0, None]
    assert MeasuredTimes().uncaptured_seconds(1) is None


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), min_size=1, max_size=8))
def test_seconds_without_graphs_never_decrease(uncaptured: dict[int, float]) -> None:
    """However noisy the measurement was."""
    times = MeasuredTimes(uncaptured=uncaptured)
    seconds = [times.uncaptured_seconds(n) for n in range(1, max(uncaptured) + 1)]
    assert all(a is not None and b is not None and b >= a - 1e-12 for a, b in itertools.pairwise(seconds))


def test_times_survive_json() -> None:
    decode = BatchDescriptor(num_tokens=4, num_reqs=4, uniform_token_count=1)
    times = MeasuredTimes({(FULL, decode): 0.25, (PIECEWISE, BatchDescriptor(num_tokens=8)): 0.5}, {4: 0.75})
    assert MeasuredTimes.from_record(json.loads(json.dumps(times.as_record()))) == times


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 2}, "several ranks"),
        ({"pipeline_parallel_size": 2}, "several stages"),
        ({"data_parallel_size": 2}, "several engines"),
        (
            {"speculative": SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 2})},
            "speculative_config",
        ),
        ({"enable_lora": True}, "enable_lora"),
    ],
)
def test_ranks_and_drafts_use_no_measured_times(options: dict[str, Any], reason: str) -> None:
    """Ranks must run the same graph, and their clocks do not agree."""
    source = ModelSource(model="model")
    assert why_not_measured(EngineConfig(source=source)) == ""
    found = why_not_measured(EngineConfig(source=source, measure_graphs=True, **options))
    assert found.startswith("graphs were not measured: measure_graphs is not available with ") and reason in found
