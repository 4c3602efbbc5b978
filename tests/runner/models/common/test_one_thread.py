"""Functions that make models wait for each other in several threads, and not for themselves in one."""

from __future__ import annotations

import threading
import time

from piecegraph.runner.models.common.one_thread import in_one_thread_at_a_time

running: list[str] = []
met: list[int] = []


@in_one_thread_at_a_time
def first(depth: int) -> int:
    return 1 + (second(depth - 1) if depth else 0)


@in_one_thread_at_a_time
def second(depth: int) -> int:
    running.append(threading.current_thread().name)
    time.sleep(0.02)
    met.append(len(running))
    running.pop()
    return 1 + (first(depth - 1) if depth else 0)


def test_one_thread_at_a_time_runs_any_of_them() -> None:
    threads = [threading.Thread(target=call, args=(2,)) for call in (first, second, first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [1] * 4
    assert first(2) == 3
