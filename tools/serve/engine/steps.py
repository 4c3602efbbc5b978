"""`Steps`, the interface of an engine to the thread that steps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class StepOutput(Protocol):
    """The output of one request in a step, as far as the thread reads it."""

    @property
    def request_id(self) -> str:
        """The id of the request."""

    @property
    def finished(self) -> bool:
        """Whether the engine has forgotten the request."""


Request_contra = TypeVar("Request_contra", contravariant=True)
Output_co = TypeVar("Output_co", bound=StepOutput, covariant=True)


class Steps(Protocol[Request_contra, Output_co]):
    """An engine that runs queued requests step by step; one thread calls all of its methods."""

    @property
    def has_unfinished(self) -> bool:
        """Return whether a step has anything to do."""

    def add(self, request_id: str, request: Request_contra) -> None:
        """Queue a checked request. Raises `RequestError` if the engine refuses it nevertheless."""

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a queued request has not been run by any step."""

    def abort(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""

    def use_idle_moment(self) -> float | None:
        """Do a part of what waits for a moment without requests.

        Returns the seconds after which there may be more to do, or None if there will be nothing.
        """

    def step(self) -> Sequence[Output_co]:
        """Run the next batch and return its outputs. A batch that raises is computed again by the next step."""
