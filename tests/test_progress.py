"""A phase that is timed is told of when it has ended."""

from __future__ import annotations

import pytest

from piecegraph.progress import Phase, timed_phase


def test_a_timed_phase_is_told_once_with_its_seconds() -> None:
    phases: list[Phase] = []
    with timed_phase(phases.append, "config"):
        assert not phases
    (phase,) = phases
    assert phase.name == "config"
    assert phase.seconds is not None and 0 <= phase.seconds < 60


def test_one_that_raises_is_not_told_of() -> None:
    phases: list[Phase] = []
    with pytest.raises(KeyError), timed_phase(phases.append, "config"):
        raise KeyError
    assert not phases


def test_nobody_needs_to_listen() -> None:
    with timed_phase(None, "config"):
        pass
