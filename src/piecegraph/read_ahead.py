"""Files read into the operating system's memory by a thread, so that who maps them later does not wait for a disk.

It runs beside imports, which are Python's work: what this does is the kernel's. No byte is copied to this process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from piecegraph.progress import READ_AHEAD, OnPhase, Phase

_CHUNK_BYTES = 32 << 20
"""Between two chunks the thread waits for its turn to run Python, 5 ms while another thread has it, and may stop."""

_MEMORY_SHARE = 0.5
"""Of the memory that can be had: more files than that would push each other out, and what else is of use."""


class ReadAhead:
    """Reads `files` in order, at most `max_bytes` of them in all, until `stop`.

    What cannot be read is left out: whoever needs the file will say so. A file in memory already costs 60 ms a GB.
    """

    def __init__(self, files: Sequence[Path], max_bytes: int) -> None:
        self.num_bytes = 0  # read so far
        self.seconds = 0.0  # from `start` to its end; 0 before that
        self._files = tuple(files)
        self._max_bytes = max_bytes
        self.stopping = threading.Event()  # set once it shall end
        self._thread = threading.Thread(target=self._run, name="piecegraph read ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Until all is read."""
        self._thread.join()

    def stop(self, on_phase: OnPhase | None = None) -> None:
        """End after the chunk it is at, wait for that, and tell what was read. Harmless once all is read, and to
        repeat."""
        self.stopping.set()
        self.wait()
        if on_phase is not None and self.num_bytes:
            what = f"{self.num_bytes / 1e9:.2f} GB, beside the rest"
            on_phase(Phase(name=READ_AHEAD, seconds=self.seconds, detail=what))

    def _run(self) -> None:
        started = time.perf_counter()
        with suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:
            for file in self._files:
                with suppress(OSError), file.open("rb", buffering=0) as source:
                    self._read(source.fileno(), nowhere.fileno())
        self.seconds = time.perf_counter() - started

    def _read(self, source: int, nowhere: int) -> None:
        offset = 0
        while not self.stopping.is_set():
            chunk = min(_CHUNK_BYTES, self._max_bytes - self.num_bytes)
            # `sendfile` to the null device has the kernel read pages and do nothing with them
            sent = os.sendfile(nowhere, source, offset, chunk) if chunk > 0 else 0
            if sent == 0:
                return
            offset += sent
            self.num_bytes += sent


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[ReadAhead]:
    """Read `files` while the block runs, as far as memory allows."""
    ahead = ReadAhead(files, max_bytes=int(available_bytes() * _MEMORY_SHARE))
    ahead.start()
    try:
        yield ahead
    finally:
        ahead.stop()


def available_bytes(meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Memory that processes can have without swapping, what the kernel keeps of files included; a container's limit
    where that is less. 0 if the system does not say."""
    found = 0
    with suppress(OSError):
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                found = int(amount.split()[0]) * 1024
    with suppress(OSError, ValueError):  # "max" is no limit
        found = min(found, int(limit.read_text(encoding="ascii")))
    return found
