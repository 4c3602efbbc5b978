"""Which files of tests one process runs: each file as a whole, and the files of a room that shares traced models."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

ROOMS = ("tests/passes/test_", "tests/runner/pooling/")
"""The files that begin so share models that are traced or loaded once in a process."""


def scope_of(nodeid: str) -> str:
    """Return the file of a test, or the room whose files stay together."""
    return next((room for room in ROOMS if nodeid.startswith(room)), nodeid.partition("::")[0])


class LoadRoomScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives processes one scope after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
