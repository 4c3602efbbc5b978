"""Which ranks share the experts of a model: those of one engine, or of several engines that step together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecegraph.runner.common.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """The engines among whose ranks the experts of each layer are divided, and which of them this is."""

    engine: int = 0
    num_engines: int = 1

    def of(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return the number of `rank`, one of this engine's `num_ranks`, among all that share experts, and how many."""
        return self.engine * num_ranks + rank, self.num_engines * num_ranks


def expert_ranks(config: EngineConfig, engine: int = 0) -> ExpertRanks | None:
    """Return who shares experts with the ranks of `engine`; None: every rank has a part of each expert."""
    if not config.enable_expert_parallel:
        return None
    return ExpertRanks(engine=engine, num_engines=config.data_parallel_size)
