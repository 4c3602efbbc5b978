"""Counters of drafts: how many were verified, and how many of them the model would have written itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counters since the start, of requests' steps that verified at least one draft."""

    num_verifications: int
    """Steps of a request that verified drafts."""
    num_draft_tokens: int
    """Drafts that were verified."""
    num_accepted_tokens: int
    """Drafts that were accepted."""
    num_accepted_by_position: tuple[int, ...]
    """Accepted drafts, by their place among the drafts of a step."""
    num_stopped_steps: int = 0
    """Steps that could have verified drafts and did not, because that was measured to be slower."""
    stop_reason: str = ""
    """Why batches like the last one are not drafted for now; "": they are."""
    is_synthetic: bool = False
    """Whether drafts are accepted by given rates, and not by the model."""

    @property
    def num_wasted_tokens(self) -> int:
        """The number of drafts that were rejected."""
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafts that were accepted; None if there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """The mean number of tokens that a verification gave, the one after the accepted drafts included."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else None

    def __str__(self) -> str:
        stopped = f"; {self.num_stopped_steps} steps without drafts" if self.num_stopped_steps else ""
        stopped += f", which are faster: {self.stop_reason}" if self.stop_reason else ""
        stopped += "; accepted by given rates, not by the model" if self.is_synthetic else ""
        if self.acceptance_rate is None or self.mean_acceptance_length is None:
            return f"no drafts{stopped}"
        return (
            f"{self.num_accepted_tokens} of {self.num_draft_tokens} drafts accepted ({self.acceptance_rate:.0%}), "
            f"{self.mean_acceptance_length:.2f} tokens a verification{stopped}"
        )
