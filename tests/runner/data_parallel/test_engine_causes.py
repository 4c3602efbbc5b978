"""An engine that only lost the others is not blamed for what ended one of them."""

from __future__ import annotations

import threading

from piecegraph.errors import WorkerError
from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.data_parallel.engine_processes import Inbox, cause_of
from piecegraph.runner.distributed.child_program import RanksLostEachOther, failure_of

LOST = failure_of(RanksLostEachOther("the ranks lost each other"))
KILLED = failure_of(WorkerError("rank 1 (process 5) ended with exit code -9."))


def test_what_is_a_consequence() -> None:
    assert LOST.is_consequence
    assert failure_of(CollectiveError("rank 1 did not answer")).is_consequence
    assert not KILLED.is_consequence


def test_the_engine_that_lost_its_rank_is_named_though_another_fails_before() -> None:
    inbox = Inbox()
    for engine in (0, 2):
        inbox.put(engine, "failed", LOST)
        inbox.put(engine, "ended", None)  # the end of its channel
    later = threading.Timer(0.1, inbox.put, (1, "failed", KILLED))
    later.start()
    assert cause_of(inbox, 0, LOST) == (1, KILLED)
    later.join()


def test_an_engine_that_ends_without_a_word_is_a_cause() -> None:
    inbox = Inbox()
    inbox.put(0, "failed", LOST)
    inbox.put(1, "ended", None)
    assert cause_of(inbox, 0, LOST) == (1, None)
    assert cause_of(inbox, 1, None) == (1, None)
