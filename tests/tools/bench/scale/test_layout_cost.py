from __future__ import annotations

import pytest

from piecegraph.tools.bench.scale.layout_cost import (
    Layout,
    Link,
    ModelSize,
    RankTimes,
    StepTimes,
    layouts,
    stage_seconds,
)

TIMES = StepTimes((1, 8, 16), (0.010, 0.017, 0.025))
RANKS = RankTimes(whole=TIMES)
SIZE = ModelSize(num_layers=4, hidden_bytes=1000, logits_bytes=8000)
LINK = Link(alpha_s=1e-4, bytes_per_s=1e9)


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 0.010), (0.5, 0.010), (4.5, 0.0135), (16, 0.025), (32, 0.041)])
def test_steps_take_times_on_lines_through_the_measured_ones(tokens: float, seconds: float) -> None:
    assert TIMES.at(tokens) == pytest.approx(seconds)


def test_one_measured_time_grows_with_the_tokens() -> None:
    assert StepTimes((8,), (0.016,)).at(16) == pytest.approx(0.032)
    assert StepTimes((8,), (0.016,)).at(1) == pytest.approx(0.016)


def test_collectives_take_what_rings_take() -> None:
    assert LINK.all_reduce_s(4e6, 4) == pytest.approx(2 * 3 * 1e-4 + 2 * 3 / 4 * 4e6 / 1e9)
    assert LINK.all_gather_s(4e6, 1) == 0.0
    assert LINK.message_s(1e6) == pytest.approx(1e-4 + 1e-3)


def test_a_link_is_fitted_to_the_sums_that_it_makes() -> None:
    for num_ranks in (2, 8):
        sums = {num_bytes: LINK.all_reduce_s(num_bytes, num_ranks) for num_bytes in (8192, 131072, 2097152)}
        found = Link.fitted(sums, num_ranks)
        assert (found.alpha_s, found.bytes_per_s) == pytest.approx((LINK.alpha_s, LINK.bytes_per_s))
    with pytest.raises(ValueError, match="sums of two sizes"):
        Link.fitted({8192: 1e-6}, 2)
    with pytest.raises(ValueError, match="do not take longer"):
        Link.fitted({8192: 2e-6, 16384: 1e-6}, 2)


KIB = 1024
LLAMA_8B = ModelSize(num_layers=32, hidden_bytes=2 * 4096, logits_bytes=2 * 128256)
ONE_H100 = StepTimes((1, 8, 32), (5.385e-3, 5.701e-3, 6.477e-3))
HALF_OF_IT = StepTimes((1, 8, 32), (3.339e-3, 3.259e-3, 3.829e-3))
TWO_H100 = {
    "pushed": ((1.8, 1.9, 2.5, 4.7, 13.3), (3.501, 3.540, 4.248), (-0.0126, -0.0388, -0.0440)),
    "NCCL": ((13.9, 14.3, 13.6, 16.6, 42.9), (3.934, 4.087, 4.684), (0.0633, 0.0177, 0.0511)),
}
"""Microseconds of sums of 8 KiB to 2 MiB, ms of steps of 1, 8 and 32 requests, the errors of the simulation."""


@pytest.mark.parametrize("sums", TWO_H100)
def test_steps_measured_on_two_gpus_are_simulated_within_seven_percent(sums: str) -> None:
    """The figures are those of docs/measurements/2026-11-27-two-h100.md, the errors those of docs/distributed.md."""
    microseconds, measured, errors = TWO_H100[sums]
    sizes = (8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 2048 * KIB)
    link = Link.fitted({size: 1e-6 * each for size, each in zip(sizes, microseconds, strict=True)}, 2)
    times = RankTimes(whole=ONE_H100, shard=HALF_OF_IT)
    two = Layout(tensor=2, pipeline=1, data=1)
    found = [1e3 * stage_seconds(tokens, tokens, two, times, LLAMA_8B, link) for tokens in (1, 8, 32)]
    assert [each / own - 1 for each, own in zip(found, measured, strict=True)] == pytest.approx(errors, abs=0.001)


def test_a_stage_divides_time_and_adds_communication() -> None:
    """Nine all-reduces of 8 tokens and one all-gather of 8 rows of logits for two ranks; a message for two stages."""
    one = stage_seconds(8, 8, Layout(tensor=1, pipeline=1, data=3), RANKS, SIZE, LINK)
    assert one == pytest.approx(0.017)
    ranks = stage_seconds(8, 8, Layout(tensor=2, pipeline=1, data=1), RANKS, SIZE, LINK)
    assert ranks == pytest.approx(0.0085 + 9 * (2e-4 + 8e-6) + 1e-4 + 3.2e-5)
    both = stage_seconds(8, 8, Layout(tensor=2, pipeline=2, data=1), RANKS, SIZE, LINK)
    assert both == pytest.approx(ranks / 2 + 1e-4 + 8e-6)


def test_what_a_share_alone_takes_tells_what_ranks_divide() -> None:
    """With 17 ms for all of a step and 13 ms for a half of what ranks divide, they divide 8 ms and leave 9 ms."""
    times = RankTimes(whole=TIMES, shard=StepTimes((8,), (0.013,)))
    assert [times.at(8, ranks) for ranks in (1, 2, 4)] == pytest.approx([0.017, 0.013, 0.011])
    assert "whole remain 9 of 17 ms in steps of 8 tokens" in times.assumption
    thirds = RankTimes(whole=TIMES, shard=StepTimes((8,), (0.011,)), num_shards=3)
    assert [thirds.at(8, ranks) for ranks in (1, 2, 3)] == pytest.approx([0.017, 0.0125, 0.011])
    assert "divides all of a step's time" in RANKS.assumption


def test_no_more_than_a_step_is_divided_and_no_less_than_nothing() -> None:
    slower = RankTimes(whole=TIMES, shard=StepTimes((8,), (0.020,)))
    assert [slower.at(8, ranks) for ranks in (1, 2, 8)] == [0.017] * 3
    faster = RankTimes(whole=TIMES, shard=StepTimes((8,), (0.001,)))
    assert faster.at(8, 2) == pytest.approx(0.0085)


def test_layouts_use_all_gpus() -> None:
    found = layouts(16)
    assert {layout.num_gpus for layout in found} == {16}
    assert len(set(found)) == len(found) == 13
    assert str(layouts(1)[0]) == "TP 1 x PP 1 x DP 1"
