"""Engines that share experts agree on each step, and sleep only when none of them has anything left to hear of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.tensor_parallel.engine_peers import Agreement, EnginePeers
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.process_group import RankGroup

NUM_ENGINES = 3


def in_engines(folder: Path, run: Callable[[EnginePeers], object]) -> list[object]:
    """Call `run` for each engine in a thread, and return its results."""
    found: list[object] = [None] * NUM_ENGINES

    def work(engine: int) -> None:
        found[engine] = run(EnginePeers(engine=engine, num_engines=NUM_ENGINES, store=str(folder / "store")))

    threads = [threading.Thread(target=work, args=(engine,)) for engine in range(NUM_ENGINES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_engines_run_as_many_tokens_as_the_largest_and_sleep_together(tmp_path: Path) -> None:
    def run(peers: EnginePeers) -> list[tuple[int, bool]]:
        agreement = Agreement.of(peers, 1)
        agreement.connect()
        found = []
        for proposed, seen in (([8, 104, 0], [1, 1, 1]), ([0, 0, 0], [1, 2, 1]), ([0, 0, 0], [2, 2, 2])):
            agreement.num_seen = seen[peers.engine]
            found.append((agreement.largest(proposed[peers.engine]), agreement.is_over))
        agreement.close()
        with pytest.raises(CollectiveError, match="closed"):
            agreement.largest(1)
        return found

    # In the second step nobody has requests, but one engine knows of a request that the others have not heard of yet.
    assert in_engines(tmp_path, run) == [[(104, False), (0, False), (0, True)]] * NUM_ENGINES


def test_tokens_of_all_engines_come_together_and_go_back(tmp_path: Path) -> None:
    def run(peers: EnginePeers) -> tuple[list[list[float]], list[list[float]]]:
        group = RankGroup(peers.group("own", 1, 60.0)._store, 0, 1, 60.0)
        group.engines = peers.group("experts", 1, 60.0)
        group.engines.connect(torch.device("cpu"))
        own = torch.full((2, 1), float(peers.engine)).T.contiguous().T
        everyones = group.gather_tokens(own)
        back = group.scatter_sum(everyones)
        group.close()
        return everyones.tolist(), back.tolist()

    everyones = [[0.0], [0.0], [1.0], [1.0], [2.0], [2.0]]
    assert in_engines(tmp_path, run) == [(everyones, [[3.0 * engine]] * 2) for engine in range(NUM_ENGINES)]


def test_experts_are_divided_among_the_ranks_of_all_engines() -> None:
    assert ExpertRanks(engine=1, num_engines=2).of(1, 3) == (4, 6)
    assert ExpertRanks().of(1, 3) == (1, 3)
