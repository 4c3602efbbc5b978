"""Who waits, in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.request_queue import RequestQueue, SchedulingPolicy
from tests.runner.scheduling.make_request import make_request


def drained(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


@pytest.mark.parametrize(
    ("policy", "order"),
    [(SchedulingPolicy.FCFS, ["a", "b", "c", "d"]), (SchedulingPolicy.PRIORITY, ["b", "d", "a", "c"])],
)
def test_each_policy_has_its_order(policy: SchedulingPolicy, order: list[str]) -> None:
    """A smaller priority goes first, equal ones by arrival; first come first served looks at arrival alone."""
    queue = RequestQueue(policy)
    for name, priority in zip("abcd", (5, 1, 5, 1), strict=True):
        queue.add(make_request(name, 1, priority=priority))
    assert drained(queue) == order


def test_a_preempted_request_returns_to_its_old_place() -> None:
    queue = RequestQueue(SchedulingPolicy.FCFS)
    for name in "abc":
        queue.add(make_request(name, 1))
    first = queue.pop()
    queue.add(first)
    assert queue.peek() is first


def test_a_removed_request_is_gone_and_its_id_free() -> None:
    """The newcomer of the same id, arrival and priority is another request."""
    queue = RequestQueue(SchedulingPolicy.FCFS)
    old, new, other = make_request("a", 1), make_request("a", 1), make_request("b", 1)
    new.arrival = old.arrival
    queue.add(old)
    queue.remove(old)
    assert old not in queue and len(queue) == 0
    queue.add(new)
    queue.add(other)
    assert new in queue and old not in queue
    assert queue.pop() is new and queue.pop() is other and len(queue) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30))
def test_order_survives_removals(entries: list[tuple[int, bool]]) -> None:
    """Whatever is taken off, the rest comes in the order of (priority, arrival)."""
    queue = RequestQueue(SchedulingPolicy.PRIORITY)
    kept: list[Request] = []
    for i, (priority, is_removed) in enumerate(entries):
        request = make_request(str(i), 1, priority=priority)
        queue.add(request)
        if is_removed:
            queue.remove(request)
        else:
            kept.append(request)
    expected = sorted(kept, key=lambda request: (request.priority, request.arrival))
    assert drained(queue) == [request.request_id for request in expected]
