"""A timed phase is reported when it has ended."""

from __future__ import annotations

import pytest

from piecegraph.progress import Phase, timed_phase


def test_a_timed_phase_is_reported_once_with_its_seconds() -> None:
    phases: list[Phase] = []
    with timed_phase(phases.append, "config"):
        assert not phases
    (phase,) = phases
    assert phase.name == "config"
    assert phase.seconds is not None and 0 <= phase.seconds < 60


def test_a_phase_that_raises_is_not_reported() -> None:
    phases: list[Phase] = []
    with pytest.raises(KeyError), timed_phase(phases.append, "config"):
        raise KeyError
    assert not phases


def test_a_phase_without_a_listener_runs() -> None:
    with timed_phase(None, "config"):
        pass
