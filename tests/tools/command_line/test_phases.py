from __future__ import annotations

import io

import pytest

from piecegraph.progress import Phase
from piecegraph.tools.command_line.phases import PhaseDisplay, describe


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        (Phase(name="kv_cache"), "kv cache"),
        (Phase(name="compile", done=2, total=3), "compile 2 of 3"),
        (Phase(name="load", seconds=1.234, detail="0.5 GiB"), "load 1.23 s (0.5 GiB)"),
    ],
)
def test_a_phase_is_one_line(phase: Phase, line: str) -> None:
    assert describe(phase) == line


def test_seconds_of_a_phase_that_ended_twice_add_up() -> None:
    display = PhaseDisplay(quiet=True)
    display(Phase(name="compile", seconds=1.0))
    display(Phase(name="compile", seconds=2.0))
    assert display.seconds == {"compile": 3.0}


def test_without_a_terminal_there_are_plain_lines_and_no_repeats() -> None:
    stream = io.StringIO()
    with PhaseDisplay(quiet=False, stream=stream) as display:
        display.spin()
        display(Phase(name="trace"))
        display(Phase(name="trace"))
        display(Phase(name="trace", seconds=1.0))
    assert stream.getvalue() == "trace\ntrace 1.00 s\n"


def test_quiet_shows_nothing() -> None:
    stream = Terminal()
    with PhaseDisplay(quiet=True, stream=stream) as display:
        display.spin()
        display(Phase(name="trace", seconds=1.0))
    assert stream.getvalue() == ""


def test_on_a_terminal_finished_phases_stay() -> None:
    """The spinner is gone when the answer begins; a line per finished phase is left."""
    stream = Terminal()
    with PhaseDisplay(quiet=False, stream=stream) as display:
        display(Phase(name="import"))
        display.spin()
        display(Phase(name="trace"))
        display(Phase(name="trace", seconds=1.0, detail="[bold]2105 nodes"))
        display.stop()
        display(Phase(name="last", seconds=2.0))
    assert "trace 1.00 s ([bold]2105 nodes)" in stream.getvalue()
    assert stream.getvalue().endswith("last 2.00 s\n")
