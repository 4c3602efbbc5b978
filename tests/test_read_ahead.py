"""Files are in the operating system's memory once they were read ahead, and nothing that goes wrong is an error."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from piecegraph import read_ahead
from piecegraph.progress import Phase
from piecegraph.read_ahead import ReadAhead, available_bytes, reading_ahead

SIZE = 3 << 20
CHUNK = 1 << 20
ENOUGH = 1 << 40


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_CHUNK_BYTES", CHUNK)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of `SIZE` bytes, on the disk."""
    made = []
    for name in ("a", "b"):
        with (tmp_path / name).open("wb") as stream:
            stream.write(os.urandom(SIZE))
            os.fsync(stream.fileno())
        made.append(tmp_path / name)
    return made


def read(files: list[Path], max_bytes: int = ENOUGH) -> ReadAhead:
    """All that it reads, unless it is stopped."""
    ahead = ReadAhead(files, max_bytes)
    ahead.start()
    ahead.wait()
    return ahead


def is_in_memory(file: Path, offset: int) -> bool:
    """Whether a page can be had without asking the disk."""
    with file.open("rb", buffering=0) as stream:
        try:
            return os.preadv(stream.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def forget(file: Path) -> None:
    """Have the kernel drop the file's pages; skips the test where it keeps them, or does not say."""
    for _ in range(50):  # it keeps those that it is still busy with
        with file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            if not is_in_memory(file, SIZE - 1):  # asking makes it read on from there
                return
        except OSError:
            pytest.skip("this file system does not tell which pages it has")
        time.sleep(0.01)
    pytest.skip("this file system keeps its pages")


def test_files_are_in_memory_afterwards(files: list[Path]) -> None:
    for file in files:
        forget(file)
    ahead = read(files)
    assert all(is_in_memory(file, offset) for file in files for offset in range(0, SIZE, CHUNK))
    assert ahead.num_bytes == 2 * SIZE
    assert ahead.seconds > 0


def test_no_more_than_it_may(files: list[Path]) -> None:
    """In order: what is needed first is what was read."""
    assert read(files, SIZE + CHUNK // 2).num_bytes == SIZE + CHUNK // 2
    assert read(files, 0).num_bytes == 0


def test_it_ends_after_the_chunk_it_is_at(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = ReadAhead(files, ENOUGH)
    is_at_a_chunk, may_go_on = threading.Event(), threading.Event()
    sendfile = os.sendfile

    def slow(out: int, source: int, offset: int, count: int) -> int:
        is_at_a_chunk.set()
        assert may_go_on.wait(timeout=60)
        return sendfile(out, source, offset, count)

    monkeypatch.setattr(os, "sendfile", slow)
    ahead.start()
    assert is_at_a_chunk.wait(timeout=60)
    stopping = threading.Thread(target=ahead.stop)
    stopping.start()
    assert ahead.stopping.wait(timeout=60)
    may_go_on.set()
    stopping.join(timeout=60)
    assert ahead.num_bytes == CHUNK
    assert not any(thread.name == "piecegraph read ahead" for thread in threading.enumerate())


def test_what_cannot_be_read_is_left_out(files: list[Path], tmp_path: Path) -> None:
    assert read([tmp_path / "missing", tmp_path, *files]).num_bytes == 2 * SIZE


def test_a_system_that_cannot_do_it_reads_nothing(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(out: int, source: int, offset: int, count: int) -> int:
        raise OSError(errno.EINVAL, "not this kind of file")

    monkeypatch.setattr(os, "sendfile", refuse)
    assert read(files).num_bytes == 0


def test_what_was_read_is_told_when_it_is_stopped(files: list[Path]) -> None:
    phases: list[Phase] = []
    ahead = read(files)
    ahead.stop(phases.append)
    (phase,) = phases
    assert (phase.name, phase.seconds, phase.detail) == ("read_ahead", ahead.seconds, "0.01 GB, beside the rest")
    ahead.stop()
    read([]).stop(phases.append)
    assert len(phases) == 1


def test_nothing_is_left_running(files: list[Path]) -> None:
    with pytest.raises(KeyError), reading_ahead(files):
        raise KeyError
    assert not any(thread.name == "piecegraph read ahead" for thread in threading.enumerate())


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """The smaller one; without either, nothing is read."""
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n", encoding="ascii")
    assert available_bytes(meminfo, limit) == 4_096_000
    limit.write_text("max\n", encoding="ascii")
    assert available_bytes(meminfo, limit) == 4_096_000
    limit.write_text("1000000\n", encoding="ascii")
    assert available_bytes(meminfo, limit) == 1_000_000
    assert available_bytes(tmp_path / "none", limit) == 0
