from __future__ import annotations

import logging
import threading

import pytest
import torch

from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.pipeline_parallel.ordered_sends import OrderedSends

TIMEOUT_S = 60.0
CPU = torch.device("cpu")


def test_tokens_that_are_there_are_sent_at_once_and_others_in_order() -> None:
    """A call whose tokens are there waits for an earlier one whose tokens are not; the caller waits for none."""
    sends, sent, computed, done = OrderedSends(CPU), list[str](), threading.Event(), threading.Event()

    def second() -> None:
        computed.wait(TIMEOUT_S)
        sent.append("second")

    def third() -> None:
        sent.append("third")
        done.set()

    sends.send(lambda: sent.append("first"), is_ready=True)
    assert sent == ["first"]
    sends.send(second, is_ready=False)
    sends.send(third, is_ready=True)
    assert sent == ["first"]
    computed.set()
    assert done.wait(TIMEOUT_S)
    assert sent == ["first", "second", "third"]
    sends.close()
    sends.close()


@pytest.mark.parametrize(("error", "is_logged"), [(ValueError("planted"), True), (CollectiveError("planted"), False)])
def test_nothing_is_sent_after_a_failure(error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The next call raises it; a failure that is no other rank's is logged at once, as there may be no next call."""
    sends, has_failed = OrderedSends(CPU), threading.Event()

    def fail() -> None:
        try:
            raise error
        finally:
            has_failed.set()

    with caplog.at_level(logging.ERROR):
        sends.send(fail, is_ready=False)
        sends.close()
    assert has_failed.is_set()
    assert ("the tokens of a step were not sent" in caplog.text) is is_logged
    with pytest.raises(type(error), match="planted"):
        sends.send(lambda: None, is_ready=True)
