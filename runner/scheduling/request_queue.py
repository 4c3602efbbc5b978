"""The queue of waiting requests."""

from __future__ import annotations

import enum
import heapq
import itertools

from piecegraph.runner.scheduling.request import Request

OrderKey = tuple[int, int, str]


class SchedulingPolicy(enum.Enum):
    """The order in which requests run; with `PRIORITY`, requests of equal priority run by arrival."""

    FCFS = "fcfs"
    PRIORITY = "priority"

    def key(self, request: Request) -> OrderKey:
        """Return a request's key: smaller keys run first, and are preempted last."""
        priority = request.priority if self is SchedulingPolicy.PRIORITY else 0
        return priority, request.arrival, request.request_id


class RequestQueue:
    """Waiting requests in the order of `policy`.

    A preempted request returns with its old key, hence before all that followed it when it was admitted.
    Adding and popping take O(log n), removing and peeking O(1) (amortised).
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[OrderKey, int, Request]] = []
        self._count = itertools.count()  # decides between equal keys: an id may be used again after an abort
        self._waiting: dict[str, Request] = {}  # not removed; the heap drops removed requests when they are its first

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return self._waiting.get(request.request_id) is request

    def add(self, request: Request) -> None:
        """Add a request, which is not waiting."""
        assert request.request_id not in self._waiting, f"{request.request_id!r} is waiting already"
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self._policy.key(request), next(self._count), request))

    def peek(self) -> Request:
        """Return the first request; the caller has checked that there is one."""
        while self._heap[0][-1] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Request:
        """Remove and return the first request; the caller has checked that there is one."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Remove `request`, which is waiting and will not wait again."""
        assert request in self, f"{request.request_id!r} is not waiting"
        del self._waiting[request.request_id]
