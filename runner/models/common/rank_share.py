"""The share of a model that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The share of `rank` in a model that `num_ranks` ranks hold together; by default all of it."""

    rank: int = 0
    num_ranks: int = 1
    experts: ExpertRanks | None = None  # among whose ranks experts are divided; None: a rank has a part of each

    @property
    def is_divided(self) -> bool:
        """Whether the rank holds less than the whole model."""
        return self.num_ranks > 1 or (self.experts is not None and self.experts.num_engines > 1)
