from __future__ import annotations

import pytest

from piecegraph.tools.bench.scale.layout_cost import Layout, Link, ModelSize, RankTimes, StepTimes
from piecegraph.tools.bench.scale.simulate import Arrival, ScaleRow, poisson_trace, simulate

FLAT = RankTimes(whole=StepTimes((1, 1000), (1.0, 1.0)))
SIZE = ModelSize(num_layers=1, hidden_bytes=1, logits_bytes=1)
FREE = Link(alpha_s=0.0, bytes_per_s=1e30)


def run(trace: list[Arrival], *, tensor: int = 1, pipeline: int = 1, data: int = 1, **options: int) -> ScaleRow:
    return simulate(trace, Layout(tensor=tensor, pipeline=pipeline, data=data), FLAT, SIZE, FREE, **options)


def test_one_request_takes_a_step_for_each_token() -> None:
    row = run([Arrival(2.0, 5, 4)])
    assert (row.seconds, row.mean_first_token_s, row.mean_latency_s) == pytest.approx((4.0, 1.0, 4.0))
    assert row.tokens_per_s == pytest.approx(1.0)
    assert row.as_record()["gpus"] == 1


def test_a_long_prompt_runs_in_chunks() -> None:
    assert run([Arrival(0.0, 25, 1)], max_num_batched_tokens=10).seconds == pytest.approx(3.0)


def test_stages_help_when_several_requests_run() -> None:
    """A request alone takes as long in two stages; two requests then take turns in both at the same time."""
    alone = run([Arrival(0.0, 1, 8)], pipeline=2)
    assert alone.seconds == pytest.approx(8.0)
    two = run([Arrival(0.0, 1, 8), Arrival(0.1, 1, 8)], pipeline=2)
    assert two.seconds == pytest.approx(8.5)  # half a step behind each other


def test_engines_share_requests_and_ranks_share_steps() -> None:
    trace = [Arrival(0.0, 1, 4)] * 4
    assert run(trace, max_num_seqs=1).seconds == pytest.approx(16.0)
    assert run(trace, max_num_seqs=1, data=4).seconds == pytest.approx(4.0)
    assert run(trace, max_num_seqs=1, data=8).seconds == pytest.approx(4.0)  # some have nothing to do
    assert run(trace, max_num_seqs=1, tensor=2).seconds == pytest.approx(8.0)


def test_every_token_is_counted_once() -> None:
    trace = poisson_trace(40, 3.0, 7, 5, seed=1)
    assert trace == poisson_trace(40, 3.0, 7, 5, seed=1)
    assert [each.at_s for each in poisson_trace(2, None, 1, 1, seed=0)] == [0.0, 0.0]
    for pipeline in (1, 2, 4):
        row = run(trace, pipeline=pipeline, max_num_seqs=8, max_num_batched_tokens=16)
        assert row.output_tokens == 200
        assert row.mean_first_token_s <= row.mean_latency_s <= row.p99_latency_s
