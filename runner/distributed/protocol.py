"""`Executor`, the protocol of what runs the ranks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from piecegraph.progress import OnPhase
    from piecegraph.runner.startup.loaded import Loaded
    from piecegraph.runner.tensor_parallel.parallel import Parallel

IDLE_LOOK_S = 1.0
"""How often a loop without requests looks whether a rank has ended."""

Method = str | Callable[..., Any]
"""The name of a method of `Worker`, or a function whose first argument is one."""


class Executor(Protocol):
    """An executor decides which processes run the steps of an engine."""

    def parallel(self) -> Parallel | None:
        """Return how this process takes part in the engine; None: it is alone. Call it once, before loading."""

    @property
    def shows_progress(self) -> bool:
        """Whether this process shows how far loading and requests are: one rank of an engine does."""

    def watched(self, on_phase: OnPhase | None) -> OnPhase | None:
        """Return an `on_phase` for loading here, which raises `WorkerError` once another rank has failed."""

    def while_loading(self) -> AbstractContextManager[None]:
        """Return a block to load in, which ends with `WorkerError` as soon as another rank ends or fails.

        If the rank has refused the model or its config, the block ends with the rank's own `PiecegraphError`.
        """

    def collective_rpc(
        self, loaded: Loaded, method: Method, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call a method of `Worker`, or a function of it, on every rank this executor reaches; results by rank."""

    def check_idle(self) -> float | None:
        """Look whether a rank has ended while no step and no call runs; a loop that waits for requests calls it.

        Returns the seconds after which to look again; None: there is nothing to look at. Raises `WorkerError` if one
        has ended, as all later calls do.
        """

    def close(self) -> None:
        """End what the executor has started. Idempotent."""
