"""The engines that share experts: how they meet, and what they agree on before each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from piecegraph.runner.pipeline_parallel.connections import START_TIMEOUT_S, no_check
from piecegraph.runner.tensor_parallel.process_group import RankGroup, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePeers:
    """Which engine this is, of those that step together, and where their ranks meet."""

    engine: int
    num_engines: int
    store: str  # an address for `open_store`

    def group(self, name: str, num_ranks: int, timeout_s: float, *, check: Callable[[], None] = no_check) -> RankGroup:
        """Return this engine's end of a group with one rank of each engine; engines give it the same name.

        On GPUs it exchanges the tokens of experts that the engines share.

        `num_ranks`: of one engine. `check`: as for `RankGroup`.
        """
        store = dist.PrefixStore(name, open_store(self.store, self.num_engines * num_ranks))
        return RankGroup(store, self.engine, self.num_engines, timeout_s, check=check, exchanges_tokens=True)


class Agreement:
    """What the first ranks of all engines tell each other before each step, in one small collective on the CPU.

    Every engine takes part in every step, whether it has requests or not, so that each has the others' experts.
    """

    def __init__(self, group: RankGroup) -> None:
        """`group`: the first rank of each engine. It has to be connected before the first step."""
        self._group = group
        self.num_seen = 0
        """How many requests of all engines this one has heard of, its own included."""
        self.is_over = False
        """Whether in the last step no engine had requests, and all had heard of the same ones: all may sleep."""

    @classmethod
    def of(cls, peers: EnginePeers, num_ranks: int, *, check: Callable[[], None] = no_check) -> Agreement:
        """Return the agreement of an engine of `num_ranks`.

        An engine waits long for another, which may be in a call of its own: what notices that one has ended or stopped
        is the front door.
        """
        return cls(peers.group("agreement", num_ranks, START_TIMEOUT_S, check=check))

    def connect(self) -> None:
        """Connect the engines, which have to call this at about the same time."""
        self._group.connect(torch.device("cpu"))

    def largest(self, num_tokens: int) -> int:
        """Return the largest `num_tokens` of all engines, which is how many each of them computes; 0: no step is run.

        Raises `CollectiveError` if an engine has ended.
        """
        own = torch.tensor([num_tokens, self.num_seen], dtype=torch.int64)
        sizes, seen = self._group.all_gather(own).view(-1, 2).unbind(1)
        largest = int(sizes.max())
        self.is_over = largest == 0 and int(seen.min()) == int(seen.max())
        return largest

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._group.close()
