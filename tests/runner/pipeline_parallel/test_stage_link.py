from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.pipeline_parallel.stage import Stage
from piecegraph.runner.pipeline_parallel.stage_link import StageLink

TIMEOUT_S = 60.0


def run_stages(num_stages: int, run: Callable[[int, StageLink], None]) -> None:
    store = dist.HashStore()
    errors: list[BaseException] = []

    def work(index: int) -> None:
        link = StageLink(store, Stage(index=index, num_stages=num_stages), TIMEOUT_S)
        try:
            link.connect()
            run(index, link)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]


def test_hidden_states_go_to_the_next_stage_and_tokens_to_all() -> None:
    """Several batches are on their way at once; bytes of any number go to the first stage."""
    done = threading.Barrier(3, timeout=TIMEOUT_S)

    def run(index: int, link: StageLink) -> None:
        waits = [link.expect_tokens(2) for _ in range(2)] if index < 2 else []
        buffers = torch.zeros(1, 5, 4)
        for step in range(2):
            out = torch.zeros(3, 4)
            if index > 0:
                link.receive_hidden(out)
            if index < 2:
                link.send_hidden(out + 1 + step, buffers)
                continue
            assert torch.equal(out, torch.full((3, 4), 2.0 * (1 + step)))
            link.send_tokens(torch.tensor([step, 7]))
        assert [wait.get().tolist() for wait in waits] == ([[0, 7], [1, 7]] if index < 2 else [])
        if index == 2:
            link.send_bytes(b"more")
        elif index == 0:
            assert link.receive_bytes(4) == b"more"
        done.wait()
        link.close()

    run_stages(3, run)


def test_a_closed_connection_says_so() -> None:
    link = StageLink(dist.HashStore(), Stage(index=0, num_stages=2), 1.0)
    link.close()
    with pytest.raises(CollectiveError, match="this connection of stages is closed"):
        link.send_hidden(torch.zeros(1, 1), torch.zeros(1, 1, 1))


def test_an_error_of_the_sending_thread_ends_the_waits_of_other_stages() -> None:
    """The stage itself has to say why it ended; the others have lost it."""
    raised: dict[int, BaseException] = {}
    waiting = threading.Barrier(2, timeout=TIMEOUT_S)

    def run(index: int, link: StageLink) -> None:
        try:
            if index == 0:
                expected = link.expect_tokens(1)
                waiting.wait()
                expected.get()
            else:
                waiting.wait()
                link.fail(ValueError("planted"))
                link.receive_hidden(torch.zeros(3))
        except Exception as error:
            raised[index] = error

    run_stages(2, run)
    assert isinstance(raised[0], CollectiveError)
    assert isinstance(raised[1], ValueError)


def test_the_connection_of_tokens_is_closed_first() -> None:
    closed: list[str] = []

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self) -> None:
            closed.append(self.name)

    link = StageLink(dist.HashStore(), Stage(index=0, num_stages=2), 1.0)
    link._hidden, link._tokens = Group("hidden"), Group("tokens")
    link.close()
    link.close()
    assert closed == ["tokens", "hidden"]
