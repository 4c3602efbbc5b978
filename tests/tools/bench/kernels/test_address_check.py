"""The cost of the check of every replay is measured by replays with it and without."""

from __future__ import annotations

from piecegraph.compiler.graphs.graphs import Graphs
from piecegraph.tools.bench.kernels.address_check import measure_address_check


def test_the_check_is_measured() -> None:
    check = Graphs._check
    found = measure_address_check(2, replays=2)
    assert (found.num_weights, found.num_watched) == (18, 4)
    assert 0 < found.check_us < found.replay_us
    assert Graphs._check is check
