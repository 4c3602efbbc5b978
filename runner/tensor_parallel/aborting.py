"""How a rank that has lost another ends what its GPU waits for, without an error that hides the loss."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from piecegraph.runner.pipeline_parallel.connections import CHECK_S

logger = logging.getLogger(__name__)


class Closing:
    """Connections that are closed, each in a thread of its own, since any of them may wait for what another ends."""

    def __init__(self, connections: Iterable[Callable[[], None]]) -> None:
        """Begin to close `connections`, each a call that closes one."""
        self._threads = [
            threading.Thread(target=attempt, args=(close, "a connection to other ranks was not closed"), daemon=True)
            for close in connections
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, deadline: float) -> None:
        """Wait until all are closed, or `deadline`, in seconds of `time.monotonic`; the threads may go on behind."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def attempt(call: Callable[[], None], message: str) -> None:
    """Make a call of a shutdown; what it raises is logged with `message`, so that the next call is made, too."""
    try:
        call()
    except Exception:
        logger.warning(message, exc_info=True)


def wait_until(is_done: Callable[[], bool], deadline: float) -> bool:
    """Return whether a GPU has ended its work before `deadline`; one whose state cannot be read has, as it failed."""
    while True:
        try:
            if is_done():
                return True
        except Exception:
            logger.warning("the GPU does not say whether it has ended", exc_info=True)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(CHECK_S)
