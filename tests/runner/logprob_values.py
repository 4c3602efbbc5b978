"""Log probabilities as plain numbers, for tests that look at nothing else of them."""

from __future__ import annotations

from collections.abc import Mapping

from piecegraph.runner.common.logprobs import Logprob


def values_of(found: Mapping[int, Logprob]) -> dict[int, float]:
    """Return the log probabilities by token."""
    return {token: one.logprob for token, one in found.items()}
