"""Kill ranks at random moments, and check that each kill ends the call with its reason and leaves no process.

`python -m tests.runner.distributed.random_kills --kills 50 --ranks 3` prints a line for each kill, and exits with 1
unless all held. Half of the kills come while the model is loaded, half while requests run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from piecegraph import LLM, SamplingParams
from piecegraph.errors import WorkerError
from tests.runner.tiny_models import make_model, save

LIMIT_S = 10.0
"""How long after a kill the call may take to end."""

PROMPTS = [[5, 17, 3], [9], list(range(20, 44))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one kill."""

    is_loading: bool
    pid: int
    seconds: float  # from the kill to the error
    message: str
    left: tuple[int, ...]  # workers that still exist

    @property
    def holds(self) -> bool:
        """Return whether the error came in time, names the rank and its exit code, and nothing is left."""
        is_named = re.search(rf"rank \d+ \(process {self.pid}\) ended with exit code -9", self.message)
        return bool(is_named) and self.seconds < LIMIT_S and not self.left


def workers() -> list[int]:
    """Return the ranks that this process has started and that exist."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = []
    for pid in map(int, children):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "piecegraph.runner.distributed.worker" in command:
            found.append(pid)
    return found


class _Killer:
    """A thread that kills one rank after a delay."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.pid = 0
        self.at = 0.0
        self.all: list[int] = []

    def start(self, delay: float) -> None:
        threading.Thread(target=self._run, args=(delay,)).start()

    def _run(self, delay: float) -> None:
        while not (found := workers()):
            time.sleep(0.01)
        time.sleep(delay)
        self.all = workers() or found
        self.pid = self._draw.choice(sorted(self.all))
        self.at = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)


def start(folder: Path, num_ranks: int) -> LLM:
    """Return a model on `num_ranks` ranks."""
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        compiler="eager",
        device="cpu",
        tensor_parallel_size=num_ranks,
        max_num_seqs=8,
        num_kv_blocks=48,
    )


def kill_once(folder: Path, num_ranks: int, draw: random.Random, *, load_s: float | None) -> Outcome:
    """Kill a random rank. `load_s`: at most how long after the ranks were started; None: while requests run."""
    killer = _Killer(draw)
    llm: LLM | None = None
    try:
        if load_s is not None:
            killer.start(draw.uniform(0, load_s))
        llm = start(folder, num_ranks)
        if load_s is None:
            killer.start(draw.uniform(0, 0.5))
        while True:
            params = SamplingParams(temperature=1.0, seed=draw.getrandbits(30), max_tokens=20)
            llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    except WorkerError as error:
        seconds, message = time.monotonic() - killer.at, str(error)
    finally:
        if llm is not None:
            llm.close()
    left = tuple(pid for pid in killer.all if Path(f"/proc/{pid}").exists())
    return Outcome(is_loading=load_s is not None, pid=killer.pid, seconds=seconds, message=message, left=left)


def show(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Kill as often as asked, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("llama"), Path(folder))
        began = time.monotonic()
        start(model, options.ranks).close()
        load_s = time.monotonic() - began
        for number in range(options.kills):
            outcome = kill_once(model, options.ranks, draw, load_s=load_s if number % 2 else None)
            outcomes.append(outcome)
            place = "loading" if outcome.is_loading else "running"
            show(f"{number} {place} {outcome.seconds:.2f} s {outcome.message} left {outcome.left}")
    slowest = max(outcome.seconds for outcome in outcomes)
    held = sum(outcome.holds for outcome in outcomes)
    show(f"{held} of {len(outcomes)} kills held; the slowest error came after {slowest:.2f} s")
    sys.exit(held != len(outcomes))


if __name__ == "__main__":
    main()
