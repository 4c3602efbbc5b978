"""Only those that know the key get a channel."""

from __future__ import annotations

import os
import subprocess
import threading
from multiprocessing import AuthenticationError

import pytest

from piecegraph.runner.clusters.channel_server import ChannelServer, DistantProcess, connect


def never() -> None:
    """Check nothing."""


def test_a_rank_with_the_key_gets_a_channel_and_others_are_turned_away() -> None:
    server = ChannelServer("127.0.0.1", b"key", 5.0)
    refused = threading.Event()

    def strangers() -> None:
        with pytest.raises((AuthenticationError, OSError, EOFError)):
            connect("127.0.0.1", server.port, b"another", 1, 7)
        stray = connect("127.0.0.1", server.port, b"key", 9, 7)  # no such rank
        with pytest.raises(EOFError):
            stray.recv()
        refused.set()
        connect("127.0.0.1", server.port, b"key", 1, os.getpid()).send("hello")

    thread = threading.Thread(target=strangers)
    thread.start()
    ((number, (channel, pid)),) = server.accept({1}, never).items()
    thread.join()
    server.close()
    assert refused.is_set()
    assert (number, pid) == (1, os.getpid())
    assert channel.recv() == "hello"
    channel.close()


def test_waiting_for_a_rank_ends_with_what_the_check_raises() -> None:
    server = ChannelServer("127.0.0.1", b"key", 5.0)

    def check() -> None:
        raise RuntimeError("the rank has ended")

    with pytest.raises(RuntimeError, match="the rank has ended"):
        server.accept({1}, check)
    server.close()


def test_a_distant_process_is_waited_for() -> None:
    ended: list[str] = []
    process = DistantProcess(5, lambda: ended[0] if ended else None, lambda: ended.append("killed"))
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait() == "killed"
