"""A store whose numbered keys begin at 0 in every engine.

torch's rendezvous of symmetric memory writes its messages under `NAME/NUMBER/RANK`, and the number counts all
rendezvous of the process. A process with an earlier engine is further on than a rank that has just been started, and
each waits for keys that the other never writes (`StoreExchange` in torch/csrc/distributed/c10d/symm_mem).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_NUMBERED = re.compile(r"(?P<name>.+)/(?P<number>\d+)/(?P<rank>\d+)")


class RenumberedStore(dist.Store):
    """Another store, in whose keys `NAME/NUMBER/RANK` the first number that comes with each name is 0.

    One engine uses it, so that all its ranks begin at the same message. Keys of another form stay as they are.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        """Return a value; waits for it."""
        return self._store.get(self._renumbered(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; by default as long as the other store does."""
        renumbered = [self._renumbered(key) for key in keys]
        if timeout is None:
            self._store.wait(renumbered)
        else:
            self._store.wait(renumbered, timeout)

    def _renumbered(self, key: str) -> str:
        parts = _NUMBERED.fullmatch(key)
        if parts is None:
            return key
        number = int(parts["number"])
        return f"{parts['name']}/{number - self._first.setdefault(parts['name'], number)}/{parts['rank']}"
