"""Measure seconds from the start of a process to its first token, phase by phase, cold and warm."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from piecegraph import environment
from piecegraph.errors import PiecegraphError
from piecegraph.progress import CONCURRENT_PHASES
from piecegraph.tools.bench.startup.child import StartJob
from piecegraph.tools.bench.startup.clock import Span, share_out

COLD, WARM = "cold", "warm"

NOT_OURS = ("interpreter", "import torch", "import transformers", "import other", "load")
"""Phases that a start takes with any runner: the process, imports of others, and reading weights."""


class StartFailed(PiecegraphError):
    """Raised when a process did not get to its first token; carries its own reason and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of one process."""

    compiler: str
    caches: str  # COLD: empty ones; WARM: those that a start before it filled
    seconds: float
    phases: Mapping[str, float]  # each moment is its innermost phase's: these and `unnamed` add up to `seconds`
    unnamed_after: Mapping[str, float]  # what is nobody's, by the phase it came after
    spans: Mapping[str, float]  # seconds of each phase as it ran, with whatever ran beside or inside it
    report: Mapping[str, Any]  # the compile report, with a row a piece
    graphs: Mapping[str, Any]  # by mode, and `device_bytes`
    notes: tuple[str, ...]
    mode: str = "full"  # "fast": it serves while pieces compile and graphs are captured
    full_speed_seconds: float | None = None  # until everything is compiled and captured; None: with the first token

    @property
    def name(self) -> str:
        return f"{self.compiler} {self.caches}" if self.mode == "full" else f"{self.compiler} fast {self.caches}"

    @property
    def unnamed(self) -> float:
        return sum(self.unnamed_after.values())

    @property
    def named_share(self) -> float:
        return 1 - self.unnamed / self.seconds

    @property
    def own_seconds(self) -> float:
        """The seconds beyond the interpreter, the imports of torch and transformers, and the reading of weights."""
        return self.seconds - sum(self.phases.get(name, 0.0) for name in NOT_OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The seconds of several starts."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        return Spread(median=statistics.median(seconds), least=min(seconds), most=max(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupRow:
    """The starts of one kind."""

    name: str  # "inductor cold"
    starts: tuple[Start, ...]
    of_first: float  # its median over the first row's

    @property
    def seconds(self) -> Spread:
        return Spread.of([start.seconds for start in self.starts])

    @property
    def full_speed_seconds(self) -> Spread:
        """The seconds until everything is compiled and captured, with no request but the first."""
        times = [start.full_speed_seconds for start in self.starts]
        return Spread.of([start.seconds if s is None else s for start, s in zip(self.starts, times, strict=True)])

    @property
    def own_seconds(self) -> Spread:
        return Spread.of([start.own_seconds for start in self.starts])

    @property
    def unnamed(self) -> Spread:
        return Spread.of([start.unnamed for start in self.starts])

    @property
    def named_share(self) -> float:
        """The share of named time, in the start where it is lowest."""
        return min(start.named_share for start in self.starts)

    @property
    def phases(self) -> dict[str, Spread]:
        """The phases by name, in the order they first ran; a start without a phase counts as 0 s of it."""
        names = dict.fromkeys(name for start in self.starts for name in start.phases)
        return {name: Spread.of([start.phases.get(name, 0.0) for start in self.starts]) for name in names}

    @property
    def unnamed_after(self) -> dict[str, Spread]:
        """The time that no span covers, by the preceding phase, largest first."""
        names = {name for start in self.starts for name in start.unnamed_after}
        found = {name: Spread.of([start.unnamed_after.get(name, 0.0) for start in self.starts]) for name in names}
        return dict(sorted(found.items(), key=lambda item: -item[1].median))

    @property
    def beside(self) -> dict[str, Spread]:
        """The seconds of threads beside these phases, by name; empty if no start of this kind had such threads."""
        did = [name for name in CONCURRENT_PHASES if any(name in start.spans for start in self.starts)]
        return {name: Spread.of([start.spans.get(name, 0.0) for start in self.starts]) for name in did}

    def as_record(self) -> dict[str, Any]:
        names = ("seconds", "full_speed_seconds", "own_seconds", "unnamed")
        spreads = {name: asdict(getattr(self, name)) for name in names}
        return {
            "name": self.name,
            **spreads,
            "named_share": self.named_share,
            "of_first": self.of_first,
            "phases": {name: asdict(spread) for name, spread in self.phases.items()},
            "unnamed_after": {name: asdict(spread) for name, spread in self.unnamed_after.items()},
            "beside": {name: asdict(spread) for name, spread in self.beside.items()},
            "starts": [{**asdict(start), "unnamed": start.unnamed} for start in self.starts],
        }


def measure_startup(
    model: str,
    arguments: Mapping[str, Any],
    compilers: Sequence[str],
    *,
    scratch: Path,
    modes: Sequence[str] = ("full",),
    is_warm_too: bool = True,
    repeats: int = 1,
    on_start: Callable[[int, int, str], None] = lambda number, total, name: None,
) -> list[StartupRow]:
    """Start `repeats` times with each compiler in each mode, cold and then warm over the cache of the cold start.

    `modes` are values of the argument `start` of `LLM`.
    Every cold start has caches of its own in `scratch`: ours, Inductor's and Triton's. Compilers take turns, so that a
    machine that gets slower slows all of them. `on_start(number, total, name)` is called before each start. Raises
    `StartFailed`.
    """
    kinds = (COLD, WARM) if is_warm_too else (COLD,)
    total = repeats * len(compilers) * len(modes) * len(kinds)
    starts: list[Start] = []
    for repeat in range(repeats):
        for compiler, mode in product(compilers, modes):
            for caches in kinds:
                on_start(len(starts) + 1, total, f"{compiler} {mode} {caches}")
                folder = scratch / f"{compiler}-{mode}-{repeat}"
                starts.append(start_once(model, {**arguments, "compiler": compiler, "start": mode}, caches, folder))
    return list(startup_rows(starts))


def startup_rows(starts: Sequence[Start]) -> Iterator[StartupRow]:
    """Return a row for each kind of start, in the order of first appearance."""
    by_name: dict[str, list[Start]] = {}
    for start in starts:
        by_name.setdefault(start.name, []).append(start)
    medians = {name: statistics.median(each.seconds for each in same) for name, same in by_name.items()}
    first = next(iter(medians.values()))
    for name, same in by_name.items():
        yield StartupRow(name=name, starts=tuple(same), of_first=medians[name] / first)


def start_once(model: str, arguments: Mapping[str, Any], caches: str, folder: Path) -> Start:
    """Run one start in a process whose caches are all in `folder`. Raises `StartFailed`."""
    variables = {
        environment.CACHE_DIR: str(folder / "piecegraph"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    program = [sys.executable, "-m", "piecegraph.tools.bench.startup.child"]
    job = StartJob(began=time.monotonic(), model=model, arguments=dict(arguments))
    done = subprocess.run(
        [*program, json.dumps(asdict(job))],
        env=environment.child_environment(variables),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it printed nothing")
        reason = last.removeprefix("error: ")
        code = done.returncode if done.returncode > 0 else 1  # below 0: a signal
        raise StartFailed(f"a {caches} start ended with status {done.returncode}: {reason}", code)
    record = json.loads(done.stdout.splitlines()[-1])
    return as_start(record, str(arguments["compiler"]), caches, str(arguments.get("start", "full")))


def as_start(record: Mapping[str, Any], compiler: str, caches: str, mode: str = "full") -> Start:
    """Return the start that a `StartRecord` in JSON describes, with its time attributed to phases."""
    spans = [Span(*span) for span in record["spans"]]
    shares = share_out(spans, record["begin"], record["end"])
    whole: dict[str, float] = {}
    for span in spans:
        whole[span.name] = whole.get(span.name, 0.0) + span.end - span.begin
    return Start(
        compiler=compiler,
        caches=caches,
        seconds=record["end"] - record["begin"],
        phases=shares.by_name,
        unnamed_after=shares.unnamed_after,
        spans=whole,
        report=record["report"],
        graphs=record["graphs"],
        notes=tuple(record["notes"]),
        mode=mode,
        full_speed_seconds=record["full_speed"] - record["begin"],
    )
