"""Flat log probabilities read as the list of dictionaries that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph.runner.common.logprobs import FlatLogprobs, Logprob, LogprobsOnePosition

POSITIONS = st.lists(
    st.dictionaries(
        st.integers(0, 9), st.builds(Logprob, st.floats(-9, 0), st.integers(1, 9), st.none() | st.text(max_size=2))
    ),
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(POSITIONS, st.slices(6))
def test_flat_logprobs_read_as_a_list(positions: list[LogprobsOnePosition], part: slice) -> None:
    flat = FlatLogprobs()
    flat.extend(positions)
    assert list(flat) == [flat[i] for i in range(len(flat))] == positions
    assert isinstance(flat[part], FlatLogprobs)
    assert list(flat[part]) == positions[part]
    if positions:
        assert flat[-1] == positions[-1]
    again = FlatLogprobs()
    again.extend(positions)
    assert flat == again


def test_a_position_without_entries_and_ends() -> None:
    flat = FlatLogprobs()
    flat.append(None)
    flat.append_entries([(7, -0.5, 1, "x")])
    assert list(flat) == [{}, {7: Logprob(-0.5, 1, "x")}]
    assert (flat.start_indices, flat.end_indices) == ([0, 0], [0, 1])
    with pytest.raises(IndexError):
        flat[2]


def test_positions_can_only_be_appended() -> None:
    flat = FlatLogprobs()
    flat.append({1: Logprob(-1.0)})
    changes: list[Callable[[], object]] = [
        lambda: flat.insert(0, {}),
        lambda: flat.pop(),
        lambda: flat.__setitem__(0, {}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="can only be appended"):
            change()
