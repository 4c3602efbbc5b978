"""Kill ranks at random moments, and check that each kill ends the call with its reason and leaves no process.

`python -m tests.runner.distributed.random_kills --kills 50 --ranks 3` prints a line for each kill, and exits with 1
unless all held. Of five kills, three come while the model is loaded, at any moment from the start of the ranks to the
end of capture, one while requests run, and one while the model is closed, which then ends without an error.

`--places` names others: "idle", a loop without requests; "adapters", which are read and removed beside requests;
"reload" of weights; "waiting", a call whose functions wait on all ranks. `--stages` divides layers, too.
"""

from __future__ import annotations

import argparse
import contextlib
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

from piecegraph import LLM, LoRARequest, SamplingParams
from piecegraph.errors import WorkerError
from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.distributed.worker import Worker
from tests.runner.lora.adapters import write_adapter
from tests.runner.tiny_models import make_model, save

LIMIT_S = 10.0
"""How long after a kill the call may take to end."""

PLACES = ("loading", "running", "loading", "closing", "loading")

OTHER_PLACES = ("idle", "adapters", "reload", "waiting")

PROMPTS = [[5, 17, 3], [9], list(range(20, 44))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one kill."""

    place: str
    pid: int
    seconds: float  # from the kill to the error, or to the end of closing
    message: str
    phase: str  # of rank 0, the last that had ended
    left: tuple[int, ...]  # workers that still exist

    @property
    def holds(self) -> bool:
        """Return whether the error came in time, names the rank and its exit code, and nothing is left."""
        is_named = re.search(rf"rank \d+ \(process {self.pid}\) ended with exit code -9", self.message)
        is_right = self.message == "" if self.place == "closing" else bool(is_named)
        return is_right and self.seconds < LIMIT_S and not self.left


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
        self.ended = threading.Event()

    def start(self, delay: float) -> None:
        threading.Thread(target=self._run, args=(delay,)).start()

    def _run(self, delay: float) -> None:
        while not self.all:
            time.sleep(0.01)
            self.all = workers()
        time.sleep(delay)
        self.all = workers() or self.all
        self.pid = self._draw.choice(sorted(self.all))
        self.at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # it was closed a moment ago
            os.kill(self.pid, signal.SIGKILL)
        self.ended.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is started."""

    folder: Path  # with the model, and with an adapter in "adapter"
    num_ranks: int
    num_stages: int
    device: str


def start(layout: Layout, on_phase: OnPhase | None = None, *, enable_lora: bool = False) -> LLM:
    """Return a model on the ranks of a layout."""
    device = layout.device
    return LLM(
        layout.folder,
        skip_tokenizer_init=True,
        dtype="float32",
        compiler="eager",
        device=device,
        graph_kind="recorded" if device == "cpu" else "auto",
        tensor_parallel_size=layout.num_ranks,
        pipeline_parallel_size=layout.num_stages,
        enable_lora=enable_lora,
        max_num_seqs=8,
        num_kv_blocks=48,
        on_phase=on_phase,
    )


def wait_here(worker: Worker) -> None:
    """Wait longer than a call that has lost a rank may take."""
    time.sleep(3 * LIMIT_S)


def use(llm: LLM, layout: Layout, place: str, draw: random.Random) -> None:
    """Do once what is done at `place`."""
    if place == "idle":
        time.sleep(llm.use_idle_moment() or 0.0)
    elif place == "reload":
        llm.reload_weights()
    elif place == "waiting":
        llm.collective_rpc(wait_here)
    else:
        params = SamplingParams(temperature=1.0, seed=draw.getrandbits(30), max_tokens=20)
        adapter = None
        if place == "adapters":
            adapter = LoRARequest("adapter", 1, str(layout.folder / "adapter"))
            llm.engine.adapters.remove(1)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        llm.generate(prompts, params, lora_request=adapter, use_tqdm=False)


def kill_once(layout: Layout, draw: random.Random, place: str, load_s: float) -> Outcome:
    """Kill a random rank at a random moment of `place`. `load_s`: how long a load takes from the start of ranks on."""
    killer = _Killer(draw)
    llm: LLM | None = None
    phases: list[str] = [""]
    message = ""

    def note(phase: Phase) -> None:
        if not killer.pid and phase.seconds is not None:
            phases[0] = phase.name

    try:
        if place == "loading":
            killer.start(draw.uniform(0, load_s))
        llm = start(layout, note, enable_lora=place == "adapters")
        if place == "closing":
            killer.all = workers()
            killer.start(0.0)
            llm.close()
            killer.ended.wait()
        elif place != "loading":
            killer.start(draw.uniform(0, 0.5))
        while place != "closing":
            use(llm, layout, place, draw)
    except WorkerError as error:
        message = str(error)
    finally:
        seconds = time.monotonic() - killer.at
        if llm is not None:
            llm.close()
    left = tuple(pid for pid in killer.all if Path(f"/proc/{pid}").exists())
    return Outcome(place=place, pid=killer.pid, seconds=seconds, message=message, phase=phases[0], left=left)


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
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--places", nargs="+", choices=sorted({*PLACES, *OTHER_PLACES}), default=PLACES)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama")
        save(model, Path(folder))
        write_adapter(model, Path(folder) / "adapter", 1, target_modules=["q_proj", "lm_head"])
        layout = Layout(folder=Path(folder), num_ranks=options.ranks, num_stages=options.stages, device=options.device)
        start(layout).close()  # whose time has the imports of this process in it
        began = time.monotonic()
        start(layout).close()
        load_s = time.monotonic() - began
        for number in range(options.kills):
            place = options.places[number % len(options.places)]
            outcome = kill_once(layout, draw, place, load_s)
            outcomes.append(outcome)
            behind = f" behind {outcome.phase or 'nothing'}" if place == "loading" else ""
            show(f"{number} {place}{behind} {outcome.seconds:.2f} s {outcome.message} left {outcome.left}")
    slowest = max(outcome.seconds for outcome in outcomes)
    held = sum(outcome.holds for outcome in outcomes)
    show(f"{held} of {len(outcomes)} kills held; the slowest error came after {slowest:.2f} s")
    sys.exit(held != len(outcomes))


if __name__ == "__main__":
    # Ranks import the functions that they call by the module's full name.
    from tests.runner.distributed import random_kills

    random_kills.main()
