"""Channels to ranks on other machines: they connect to rank 0, both sides prove that they know a key, and talk."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

LOOK_S = 0.2
"""How long to wait for a connection between two looks at the processes that should make one."""

HELLO_S = 10.0
"""How long one that has connected has to prove that it knows the key."""


class ChannelServer:
    """A listening socket that accepts one channel from each of several numbered processes."""

    def __init__(self, host: str, key: bytes, timeout_s: float) -> None:
        """Listen on a free port. `timeout_s`: how long a message may wait to be taken; then it raises OSError."""
        self._key = key
        self._timeout_s = timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.settimeout(LOOK_S)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, numbers: set[int], check: Callable[[], None]) -> dict[int, tuple[Connection, int]]:
        """Return the channel and the process id of each number, once all have connected.

        Whoever does not know the key, or gives another number, is turned away. `check` is called now and then, and may
        raise.
        """
        found: dict[int, tuple[Connection, int]] = {}
        while set(found) != numbers:
            check()
            with contextlib.suppress(TimeoutError):
                met = self._meet()
                if met is None:
                    continue
                channel, number, pid = met
                if number in numbers and number not in found:
                    found[number] = channel, pid
                else:
                    channel.close()
        return found

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()

    def _meet(self) -> tuple[Connection, int, int] | None:
        """Accept a connection; None: whoever made it was turned away."""
        accepted, _ = self._socket.accept()
        accepted.setblocking(True)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = struct.pack("ll", int(HELLO_S), 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(int(self._timeout_s), 1), 0))
        file = accepted.detach()
        channel = Connection(file)
        try:
            deliver_challenge(channel, self._key)
            answer_challenge(channel, self._key)
            number, pid = struct.unpack("!qq", channel.recv_bytes(16))
        except (AuthenticationError, OSError, EOFError, struct.error):
            channel.close()
            return None
        with socket.socket(fileno=file) as again:  # no limit from here on: a rank may have nothing to say
            again.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            again.detach()
        return channel, number, pid


def connect(host: str, port: int, key: bytes, number: int, pid: int) -> Connection:
    """Return a channel to a `ChannelServer`. Raises `AuthenticationError` if it does not know the key."""
    channel = Client((host, port), authkey=key)
    with socket.socket(fileno=channel.fileno()) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.detach()
    channel.send_bytes(struct.pack("!qq", number, pid))
    return channel


class DistantProcess:
    """A process that another one has started: how it ends is known from what that one says.

    It has the methods of `subprocess.Popen` that a `Child` needs.
    """

    def __init__(self, pid: int, look: Callable[[], str | None], kill: Callable[[], None]) -> None:
        """Store the parts. `look` says how the process has ended, None while it runs; `kill` ends it."""
        self.pid = pid
        self._look = look
        self._kill = kill

    def poll(self) -> str | None:
        """Return how the process has ended; None: it runs."""
        return self._look()

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the end. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (found := self._look()) is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return found

    def kill(self) -> None:
        """End the process."""
        self._kill()
