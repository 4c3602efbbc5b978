"""`PoolingSteps`, the steps of an engine that pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecegraph.runner.pooling.engine import PooledOutput, PoolingEngine
    from piecegraph.runner.pooling.params import PoolingParams
    from piecegraph.runner.pooling.step import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """A checked text with its parameters."""

    text: Text
    params: PoolingParams


class PoolingSteps:
    """The steps of `engine`: each runs all texts that fit into it. Implements `Steps`."""

    def __init__(self, engine: PoolingEngine) -> None:
        self._engine = engine

    @property
    def has_unfinished(self) -> bool:
        """Return whether any text is queued."""
        return self._engine.has_unfinished

    def add(self, request_id: str, request: PoolingRequest) -> None:
        """Queue a checked text."""
        self._engine.add_request(request_id, request.text, request.params, is_checked=True)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether the text is queued; one step runs it whole."""
        return request_id in self._engine

    def abort(self, request_id: str) -> None:
        """Drop a queued text."""
        self._engine.abort(request_id)

    def use_idle_moment(self) -> float | None:
        """Return None: nothing waits for one."""
        return None

    def step(self) -> Sequence[PooledOutput]:
        """Run the next batch and return its outputs."""
        return self._engine.step()
