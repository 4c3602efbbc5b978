"""Counters: summed without a lock, whoever writes meanwhile; what says nothing is counted as that."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from piecegraph.cache.disk import counters
from piecegraph.cache.disk.counters import Counters, Totals

# Later Pythons warn where other tests have left threads; the children here run our own Python only, and exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

KEY = "a" * 64


def test_recorded_events_are_summed(tmp_path: Path) -> None:
    found = Counters(tmp_path / "log")
    assert found.read() == Totals()
    found.hit(KEY, 1.5)
    found.hit(KEY, 2)
    found.miss(KEY, "absent")
    found.saved(KEY)
    found.quarantined(KEY, "blob")
    assert found.read() == Totals(
        hits=2, misses={"absent": 1}, quarantined=1, saves=1, seconds_saved=3.5, hits_by_key={KEY: 2}
    )
    found.clear()
    found.clear()
    assert found.read() == Totals()


def test_torn_and_foreign_lines_are_counted_and_no_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    texts = [b'{"event":"hi', b"[1]", b'{"event":"hit","key":1,"seconds":1}', b'{"event":"new kind"}', b"\xff\xfe"]
    texts.append(b"[" * 100000)
    lines = [b"%08x %s" % (zlib.crc32(text), text) for text in texts]
    path.write_bytes(b"\n".join([*lines, b'{"event":"saved","key":"no checksum"}', b"", b""]))
    found = Counters(path)
    found.hit(KEY, 1.0)
    assert (found.read().hits, found.read().unreadable) == (1, 8)


def test_processes_count_at_once_and_lose_nothing(tmp_path: Path) -> None:
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            for _ in range(100):
                Counters(tmp_path / "log").hit(KEY, 1.0)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    totals = Counters(tmp_path / "log").read()
    assert (totals.hits, totals.unreadable) == (400, 0)


def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MAX_COUNTERS_BYTES", 500)
    found = Counters(tmp_path / "log")
    for _ in range(50):
        found.hit(KEY, 1.0)
    assert found.path.stat().st_size < 700
    assert found.read().full


def test_an_unwritable_counter_file_raises_nothing(tmp_path: Path) -> None:
    Counters(tmp_path / "no" / "folder").hit(KEY, 1.0)
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    Counters(tmp_path / "log").hit(KEY, 1.0)
    assert not (tmp_path / "elsewhere").exists()


def test_a_log_with_a_second_name_is_not_written(tmp_path: Path) -> None:
    """It is somebody's file, linked under our name."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "log").hardlink_to(tmp_path / "precious")
    Counters(tmp_path / "log").hit(KEY, 1.0)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("seconds", ["1" + "0" * 400, "NaN", "-1", "1e999"])
def test_seconds_that_are_none_are_not_summed(tmp_path: Path, seconds: str) -> None:
    text = b'{"event":"hit","key":"k","seconds":%s}' % seconds.encode()
    (tmp_path / "log").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    assert Counters(tmp_path / "log").read() == Totals(unreadable=1)
