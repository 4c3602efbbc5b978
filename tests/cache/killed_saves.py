"""Saves that are killed at random times: `python -m tests.cache.killed_saves FOLDER KILLS SEED` prints what they left.

A process of its own, since it is forked for every save: one that has torch in it takes twenty times as long to fork.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from piecegraph.cache.store.entry_file import MissReason
from piecegraph.cache.store.store import Loaded, Store
from piecegraph.cache.upkeep.collect import collect
from tests.cache.cache_roots import NOW, a_store, an_entry, saved, start

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = 6
BIG = 60_000
AT_ONCE = 256
"""Bytes that a write takes, of the `BIG` that a save has: most of a save is writing, so most kills come in it."""


@dataclass
class Outcome:
    """What the saves came to, and what was found after each."""

    killed: int = 0
    finished: int = 0  # before the signal came
    wrong: int = 0  # loads of anything but the whole old or the whole new, or a miss where there was an old one
    lost: int = 0  # entries of other keys that did not load
    half_written: int = 0  # kills that left a file under a temporary name
    new: int = 0  # killed saves whose entry was there nevertheless
    orphans: int = 0  # blobs and temp files that were swept
    unswept: int = 0  # files that nobody needs, after a collection


def run_in_a_process_of_its_own(folder: Path, kills: int, seed: int) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.cache.killed_saves", str(folder), str(kills), str(seed)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout))


def killed_saves(folder: Path, kills: int, seed: int) -> Outcome:
    """Save under one of a few keys again and again, each save killed, until so many have died.

    How long a save takes is measured, and may be measured wrong: while none has died in the middle of a file, up to ten
    times as many die.
    """
    chance = random.Random(seed)
    os.fsync = lambda fd: None  # a kill loses nothing that was written
    os.write = partial(_write_a_little, os.write)
    outcome = Outcome()
    store = a_store(folder)
    others = [saved(store, {"plan": b"other %d" % each}, other=each) for each in range(3)]
    there: dict[int, dict[str, bytes]] = {}
    seconds = max(_save_seconds(store) for _ in range(5))
    while outcome.killed < kills or (not outcome.half_written and outcome.killed < 10 * kills):
        number, serial = chance.randrange(KEYS), outcome.killed + outcome.finished
        new = {"plan": b"%d" % serial, "piece": chance.randbytes(BIG), "shared": b"same" * 1000}
        temp_files_before = len(list(store.layout.temp.iterdir()))
        pid = _start_saving(store, number, new)
        time.sleep(chance.random() * seconds)
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), f"a save ended with {status}"
        if status == 0:
            outcome.finished += 1
        else:
            outcome.killed += 1
        temp_files = len(list(store.layout.temp.iterdir()))
        outcome.half_written += temp_files > temp_files_before

        old = there.get(number)
        found = a_store(folder).load(an_entry(new, number=number).key)
        if isinstance(found, Loaded):
            outcome.wrong += found.blobs not in (old, new)
            outcome.new += status != 0 and found.blobs == new
            there[number] = dict(found.blobs)
        else:
            outcome.wrong += old is not None or status == 0 or found.reason is not MissReason.ABSENT
        outcome.lost += sum(not isinstance(store.load(other.key), Loaded) for other in others)
        if serial % 20 == 0:
            _sweep(store, outcome)
            outcome.lost += sum(
                getattr(store.load(an_entry(blobs, number=each).key), "blobs", None) != blobs
                for each, blobs in there.items()
            )
    _sweep(store, outcome)
    return outcome


def _write_a_little(write: Callable[[int, bytes | memoryview], int], fd: int, data: bytes | memoryview) -> int:
    return write(fd, data[:AT_ONCE])


def _save_seconds(store: Store) -> float:
    """How long a process takes that nobody kills: longer than a save here, its memory is yet to be copied."""
    pid = _start_saving(store, -1, {"plan": b"first", "piece": random.randbytes(BIG), "shared": b"other" * 1000})
    begin = time.perf_counter()
    os.waitpid(pid, 0)
    return time.perf_counter() - begin


def _start_saving(store: Store, number: int, blobs: dict[str, bytes]) -> int:
    """The process that saves; it has begun."""
    begun, begin = os.pipe()

    def save() -> None:
        os.write(begin, b"x")
        saved(store, blobs, number=number)

    pid = start(save)
    os.close(begin)
    os.read(begun, 1)
    os.close(begun)
    return pid


def _sweep(store: Store, outcome: Outcome) -> None:
    """Collect what is left of the dead, long after, and count what is still there."""
    done = collect(store.layout, now=NOW * 2, max_bytes=None)
    outcome.orphans += done.temp_files + len(done.blobs)
    named = {ref.digest for row in store.list() if row.file.entry for ref in row.file.entry.blobs.values()}
    blobs = {path.name for path in store.layout.blobs.iterdir()}
    outcome.unswept += len(blobs - named) + len(list(store.layout.temp.iterdir()))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(killed_saves(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))))  # noqa: T201
