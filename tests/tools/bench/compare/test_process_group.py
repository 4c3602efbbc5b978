"""Tests of ending a program with all that it started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.tools.bench.compare import process_group
from piecegraph.tools.bench.compare.process_group import end_group

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{then}
"""


def program(then: str) -> tuple[subprocess.Popen[str], int]:
    """A program in a group of its own, and the process that it started."""
    code = PARENT.format(then=then)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("then", ["time.sleep(600)", ""], ids=["it runs", "it ended before"])
def test_nothing_of_it_lives_afterwards(then: str) -> None:
    parent, child = program(then)
    with parent:
        if not then:
            parent.wait()
        assert lives(child)
        end_group(parent.pid)
        assert not lives(child)
        assert not lives(parent.pid)


def test_a_process_that_does_not_die_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = program("time.sleep(600)")
    with parent:
        with monkeypatch.context() as patched:
            patched.setattr(process_group, "GONE_WITHIN_S", 0.05)
            patched.setattr(os, "killpg", lambda group, number: None)
            with pytest.raises(TimeoutError, match=rf"processes \[.*{child}.*\] of a program"):
                end_group(parent.pid)
        end_group(parent.pid)


def test_a_group_that_is_gone_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as parent:
        parent.wait()
    end_group(parent.pid)
