"""A Ctrl-C ends a command with 130, also where Python could not raise it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from piecegraph.progress import Phase
from piecegraph.tools.command_line.interrupts import raise_if_interrupted, remembered_interrupts
from piecegraph.tools.command_line.phases import PhaseDisplay


class Swallows:
    """An object whose `__del__` loses what is raised in it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


LOSES_ONE = """
import signal, sys, weakref
from piecegraph.progress import Phase
from piecegraph.tools import cli
from piecegraph.tools.commands import env as env_command
from piecegraph.tools.command_line.phases import PhaseDisplay

class Referred:
    pass

def work():
    referred = Referred()
    reference = weakref.ref(referred, lambda _: signal.raise_signal(signal.SIGINT))
    del referred
    print("went on", flush=True)
    {then}
    return []

env_command.machine_facts = work
sys.exit(cli.main(["env"]))
"""
"""A program whose command loses a Ctrl-C and then does something."""


def run(then: str) -> subprocess.CompletedProcess[str]:
    program = LOSES_ONE.format(then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("then", "printed"),
    [
        ("PhaseDisplay(quiet=True)(Phase(name='trace')); print('too far')", "went on\n"),
        ("raise ValueError('made of the interrupt')", "went on\n"),
    ],
    ids=["a phase begins", "an error comes of it"],
)
def test_a_lost_interrupt_ends_the_command(then: str, printed: str) -> None:
    done = run(then)
    assert (done.returncode, done.stdout) == (130, printed), done.stderr
    assert done.stderr.strip() == "interrupted"


def test_a_lost_interrupt_is_reported_at_the_end() -> None:
    done = run("pass")
    assert done.returncode == 130, done.stderr
    assert done.stdout.startswith("went on\n")
    assert done.stderr.strip() == "interrupted"


def test_the_second_ends_at_once() -> None:
    """No code after it runs, not even clean-up."""
    done = run(
        "\n    try:\n        signal.raise_signal(signal.SIGINT)\n    finally:\n        print('cleaned up', flush=True)"
    )
    assert (done.returncode, done.stdout) == (130, "went on\n"), done.stderr
    assert done.stderr.strip() == "interrupted"


def test_each_check_raises_a_remembered_interrupt() -> None:
    """Every check raises it, until the command line has ended."""
    display = PhaseDisplay(quiet=True)
    with remembered_interrupts() as handler:
        display(Phase(name="trace"))
        Swallows()
        assert handler.was_asked
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                display(Phase(name="trace"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    raise_if_interrupted()


def test_an_existing_handler_is_kept() -> None:
    """A shell's background job ignores SIGINT, and a host program may have a handler."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with remembered_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_of_the_main_thread_nothing_changes() -> None:
    """Python refuses handlers there."""
    seen = []

    def enter() -> None:
        with remembered_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
