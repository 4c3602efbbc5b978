from __future__ import annotations

import logging
import threading

import pytest
import torch

from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.pipeline_parallel.ordered_sends import OrderedSends

TIMEOUT_S = 60.0
CPU = torch.device("cpu")


def fail(error: BaseException) -> None:
    raise error


def test_tokens_that_are_there_are_sent_at_once_and_others_in_order() -> None:
    """A call whose tokens are there waits for an earlier one whose tokens are not; the caller waits for none."""
    sends, sent, computed, done = OrderedSends(CPU, fail), list[str](), threading.Event(), threading.Event()

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
    """It is given to `on_error` and, if it is not another rank's, logged: there may be no next call to raise it."""
    found: list[BaseException] = []
    sends = OrderedSends(CPU, found.append)
    with caplog.at_level(logging.ERROR):
        sends.send(lambda: fail(error), is_ready=False)
        sends.close()
    assert found == [error]
    assert ("the tokens of a step were not sent" in caplog.text) is is_logged
    with pytest.raises(type(error), match="planted"):
        sends.send(lambda: None, is_ready=True)
