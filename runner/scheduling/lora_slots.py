"""The slots of the device in which adapters lie: which adapter each holds, and which requests use it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple, Protocol


class Adapter(Protocol):
    """A loaded adapter, as far as the scheduler knows it."""

    @property
    def digest(self) -> bytes:
        """The digest of its contents; equal adapters have equal ones."""


class LoraAssignment(NamedTuple):
    """The slot that a request's adapter lies in, from the step that adds the request on."""

    slot: int
    to_write: Adapter | None  # the adapter to write to the slot before that step; None: it is there


class LoraSlots:
    """The slots of adapters on the device, each with one adapter at a time, which running requests share.

    A slot whose adapter no running request uses keeps it until another adapter needs a slot; the one that was used
    longest ago goes first. Adapters in `pinned`, a set that its owner may change, stay.
    """

    def __init__(self, num_slots: int, pinned: Set[bytes] = frozenset()) -> None:
        self._num_slots = num_slots
        self._pinned = pinned
        self.start_over()

    def start_over(self) -> None:
        """Forget what the slots hold: after a failed step they are written again."""
        self._slot_of: dict[bytes, int] = {}  # by digest, the least recently used first
        self._num_users: dict[bytes, int] = {}  # running requests, by digest; no zeros
        self._free = list(range(self._num_slots))

    @property
    def held(self) -> frozenset[bytes]:
        """The digests of the adapters that running requests use."""
        return frozenset(self._num_users)

    @property
    def resident(self) -> tuple[bytes, ...]:
        """The digests of the adapters that lie in slots, the least recently used first."""
        return tuple(self._slot_of)

    def num_users(self, digest: bytes) -> int:
        """Return how many running requests use an adapter."""
        return self._num_users.get(digest, 0)

    def can_hold(self, adapter: Adapter) -> bool:
        """Return whether the adapter lies in a slot or can be given one now."""
        return adapter.digest in self._slot_of or bool(self._free) or self._victim() is not None

    def acquire(self, adapter: Adapter) -> LoraAssignment:
        """Give a request that begins to run the slot of its adapter; `can_hold` must be true."""
        digest = adapter.digest
        slot = self._slot_of.pop(digest, None)
        to_write = None if slot is not None else adapter
        if slot is None:
            slot = self._free.pop() if self._free else self._slot_of.pop(self._evicted())
        self._slot_of[digest] = slot  # the most recently used
        self._num_users[digest] = self.num_users(digest) + 1
        return LoraAssignment(slot, to_write)

    def release(self, adapter: Adapter) -> None:
        """Note that a request with the adapter runs no longer; the adapter stays in its slot."""
        left = self._num_users[adapter.digest] - 1
        if left:
            self._num_users[adapter.digest] = left
        else:
            del self._num_users[adapter.digest]

    def least_used(self, count: int, besides: Iterable[bytes]) -> frozenset[bytes]:
        """Return up to `count` adapters that are neither pinned nor among `besides`, those with the fewest users."""
        kept = {*besides, *self._pinned}
        left = sorted((users, self._slot_of[digest], digest) for digest, users in self._num_users.items())
        return frozenset([digest for _, _, digest in left if digest not in kept][:count])

    def _victim(self) -> bytes | None:
        """Return the adapter whose slot the next one gets, or None if all are in use or pinned."""
        return next((each for each in self._slot_of if each not in self._num_users and each not in self._pinned), None)

    def _evicted(self) -> bytes:
        victim = self._victim()
        assert victim is not None, "no slot is free; see can_hold"
        return victim


class WaitingAdapters:
    """The adapters that have to wait for a slot while the scheduler admits requests to one step.

    For each of them, one adapter in use, that of the fewest requests, is given to no more requests until its slot is
    free. So no adapter waits longer than the requests that run now.
    """

    def __init__(self, slots: LoraSlots) -> None:
        self._slots = slots
        self._digests: set[bytes] = set()

    def has_to_wait(self, adapter: Adapter) -> bool:
        """Return whether no request with the adapter may be admitted to this step; note it if it waits for a slot."""
        digest, waiting = adapter.digest, self._digests
        ending = self._slots.least_used(len(waiting), waiting) if waiting else ()
        if self._slots.can_hold(adapter) and digest not in ending and digest not in waiting:
            return False
        if digest not in ending:
            waiting.add(digest)
        return True
