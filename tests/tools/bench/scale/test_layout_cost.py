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
