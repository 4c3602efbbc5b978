"""What every process writes that is started for others: its logs say whose they are."""

from __future__ import annotations

import subprocess
import sys

from piecegraph import environment

PROGRAM = """
import logging
from multiprocessing import Pipe
from piecegraph.runner.distributed.child_program import serve_channel

def serve(channel, number):
    logging.getLogger("some.module").warning("%d blocks are left", 7)
    channel.recv()  # the other end has ended

ours, theirs = Pipe()
ours.close()
raise SystemExit(serve_channel("rank", 3, theirs, serve))
"""


def test_logs_carry_the_rank() -> None:
    """The end of rank 0 is not an error of a rank."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment.child_environment({}),
        stderr=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert found.stderr == "[rank 3] WARNING some.module: 7 blocks are left\n"
