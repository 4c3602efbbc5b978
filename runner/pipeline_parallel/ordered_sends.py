"""`OrderedSends`, which sends the tokens of steps in the order of steps, once a GPU has computed them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

from piecegraph.passes.ops.collectives import CollectiveError

logger = logging.getLogger(__name__)

CLOSE_S = 1.0
"""How long `close` waits for the thread, which may wait for a GPU that has lost another rank."""


class OrderedSends:
    """Calls that send tokens, one after the other.

    A call whose tokens are on the host runs at once, and any other in a thread that waits for them, so that the next
    step is launched meanwhile. After a call that raises no other runs.
    """

    def __init__(self, device: torch.device, on_error: Callable[[BaseException], None]) -> None:
        """`device`: where the tokens are computed. `on_error` gets what a call has raised in the thread.

        It has to end the wait of those who expect the tokens: this rank may itself wait for one of them, so that
        there would be no later call to raise the error.
        """
        self._device = device
        self._on_error = on_error
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def send(self, call: Callable[[], None], *, is_ready: bool) -> None:
        """Run `call` after all earlier ones. `is_ready`: whether it would not wait for tokens.

        Raises what it raises, or what an earlier one has raised in the thread.
        """
        if self._error is not None:
            raise self._error
        if is_ready and not self._calls.unfinished_tasks:
            call()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="piecegraph sends tokens", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def close(self) -> None:
        """End the thread after the calls it has. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join(CLOSE_S)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        while (call := self._calls.get()) is not None:
            try:
                if self._error is None:
                    call()
            except BaseException as error:
                self._error = error
                if not isinstance(error, CollectiveError):  # else another rank knows the cause
                    logger.error("the tokens of a step were not sent", exc_info=error)
                self._on_error(error)
            self._calls.task_done()
