"""A real server process on a loopback port, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

HTTP = httpx.Client(timeout=60, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""A connection for each request. `httpx.get` would also read the certificates of the machine for each."""

PROGRAM = [sys.executable, "-m", "piecegraph"]


class ServerProcess:
    """A `piecegraph serve` that runs, and everything that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the line with the address."""
        assert self._is_ready.wait(timeout_s), f"no address within {timeout_s} s: {self.log}"
        assert self.url, self.log

    @property
    def log(self) -> str:
        """All lines so far."""
        return "".join(self.lines)

    def end(self, signum: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(signum)
        return self.process.wait(timeout_s)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.match(r"serving on (\S+)", line)
            if found is not None:
                self.url = found[1]
                self._is_ready.set()
        self._is_ready.set()


@contextmanager
def running_server(model: Path | None, *flags: str, **environment: str) -> Iterator[ServerProcess]:
    """Start a server on a free port, wait until it serves, and end it afterwards. `model` None: the embedded one."""
    process = subprocess.Popen(
        [
            *PROGRAM,
            "serve",
            *([] if model is None else [str(model)]),
            "--port",
            "0",
            "--compiler",
            "eager",
            "--dtype",
            "float32",
            *flags,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    server = ServerProcess(process)
    try:
        server.wait_until_ready(240)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
