"""The library of matrix products made ready by a thread, while the model is made and its weights are loaded.

Its first product takes the library some 70 ms, for which Python is not needed; so the first step does not wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

ROWS, SIZE, COLUMNS = 2048, 1024, 2048
"""Of the product: large enough for the kernels that prompts take, 16 MiB in all."""


def multiply(device: torch.device) -> None:
    """One product of `device`, whose numbers nobody reads. Dtypes are said: a default may be another's just now."""
    with torch.cuda.device(device), torch.no_grad():
        rows = torch.zeros(ROWS, SIZE, dtype=torch.bfloat16, device=device)
        weight = torch.zeros(COLUMNS, SIZE, dtype=torch.bfloat16, device=device)
        torch.nn.functional.linear(rows, weight)
        torch.cuda.synchronize(device)


class LibraryAhead:
    """One product in a thread of its own, on a GPU; nothing elsewhere."""

    def __init__(self, device: torch.device, run: Callable[[torch.device], None] = multiply) -> None:
        self._device = device
        self._run = run
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._attempt, name="piecegraph library ahead", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until it is done; harmless when repeated."""
        if self._thread is not None:
            self._thread.join()

    def _attempt(self) -> None:
        try:
            self._run(self._device)
        except Exception as error:  # the first step multiplies too, and says what is wrong
            logger.info("the library of matrix products was not made ready: %s", error)
