"""Run programs that measure the same thing one after the other on one machine, and put their figures side by side.

Each program is a command whose last line of output is a JSON object of numbers, or of objects of numbers, by name.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from piecegraph import environment
from piecegraph.errors import ConfigError
from piecegraph.tools.bench.compare.process_group import end_group

OURS = "piecegraph"
FLOORS = "floors"
"""The key of an object under which it has the best possible values of its figures, by their names."""

GREEDY_TOKENS = "greedy_tokens"
"""The key of the tokens that a program generates greedily for the prompt that all have."""

HIGHER_IS_BETTER = ("_tok_s", "_per_s")
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception|Exit): ")

LOWER_IS_BETTER = ("_s", "_ms", "_us", "_gib", "_bytes")


@dataclass(frozen=True, slots=True)
class Peer:
    """A program to run."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """One run of a peer: what it printed, or why there is no record."""

    name: str
    record: Mapping[str, Any] | None
    reason: str | None
    seconds: float


def parse_peer(text: str) -> Peer:
    """Parse `name=command with words` into a `Peer`. Raises `ConfigError`."""
    name, equals, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the command of the peer {name!r} is not words of a shell: {error}.") from error
    if not equals or not name.strip() or not words:
        raise ConfigError(f"{text!r} is not a peer; write NAME=COMMAND, such as vllm='python vllm_bench.py {{model}}'.")
    return Peer(name.strip(), tuple(words))


def run_peer(peer: Peer, timeout_s: float) -> PeerRun:
    """Run a peer to its end in a session of its own, and leave none of its processes behind.

    A program that fails, prints no object or takes longer than `timeout_s` gives a run with a reason and raises
    nothing. Raises `end_group`'s `TimeoutError` for a program that cannot be ended: the next program would be measured
    beside it.
    """
    started = time.monotonic()

    def run_of(record: Mapping[str, Any] | None, reason: str | None) -> PeerRun:
        return PeerRun(name=peer.name, record=record, reason=reason, seconds=time.monotonic() - started)

    try:
        process = subprocess.Popen(
            peer.command,
            env=environment.child_environment({}) if peer.name == OURS else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return run_of(None, f"it cannot be started: {error}")
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return run_of(None, f"it took longer than {timeout_s:g} s")
        finally:
            end_group(process.pid)  # whatever it started and left; after an interrupt, all of it
    if process.returncode != 0:
        return run_of(None, f"it ended with status {process.returncode}: {_error_in(err) or _last_line(out)}")
    record = _object_in(_last_line(out))
    return run_of(record, None if record is not None else f"its last line is not a JSON object: {_last_line(out)!r}")


def _error_in(text: str) -> str:
    """Return the last line that names an error or an exception, else the last line: warnings may follow an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.search(line)]
    return (named or lines or [""])[-1]


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _object_in(line: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def compare(
    peers: Sequence[Peer],
    *,
    repeats: int,
    timeout_s: float,
    on_run: Callable[[int, int, str], None] = lambda number, total, name: None,
) -> list[PeerRun]:
    """Run each peer `repeats` times, taking turns. `on_run(number, total, name)` is called before each run."""
    runs: list[PeerRun] = []
    for _ in range(repeats):
        for peer in peers:
            on_run(len(runs) + 1, repeats * len(peers), peer.name)
            runs.append(run_peer(peer, timeout_s))
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of one program, over its runs."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One number, by program."""

    metric: str  # "tpot_ms 8"
    is_higher_better: bool | None  # None: it is not known
    figures: Mapping[str, Figure]  # of those that have it
    floor: float | None  # the best it could be, if ours says so

    def ratio(self, name: str) -> float | None:
        """Return how many times better ours is than `name`'s, by medians; None if one of the two has no figure."""
        ours, theirs = self.figures.get(OURS), self.figures.get(name)
        if ours is None or theirs is None or self.is_higher_better is None:
            return None
        above, below = (ours, theirs) if self.is_higher_better else (theirs, ours)
        return above.median / below.median if below.median else None

    @property
    def share_of_floor(self) -> float | None:
        """The ratio of our figure to the best possible one; 1 is the best."""
        ours = self.figures.get(OURS)
        if ours is None or not self.floor or not ours.median or self.is_higher_better is None:
            return None
        return ours.median / self.floor if self.is_higher_better else self.floor / ours.median


def compare_rows(runs: Sequence[PeerRun]) -> list[CompareRow]:
    """Return a row for each number that any program reported, in the order of first appearance."""
    values: dict[str, dict[str, list[float]]] = {}
    floors: dict[str, list[float]] = {}
    for run in runs:
        record = dict(run.record or {})
        for metric, value in numbers(record.pop(FLOORS, {})):
            floors.setdefault(metric, []).append(value)
        for metric, value in numbers(record):
            values.setdefault(metric, {}).setdefault(run.name, []).append(value)
    return [
        CompareRow(
            metric=metric,
            is_higher_better=is_higher_better(metric),
            figures={
                name: Figure(median=statistics.median(each), least=min(each), most=max(each))
                for name, each in of_metric.items()
            },
            floor=statistics.median(floors[metric]) if metric in floors else None,
        )
        for metric, of_metric in values.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far another program generates our greedy tokens for one prompt, which says that it runs the same model."""

    name: str
    same: int  # tokens before the first that differs
    num_tokens: int

    def as_line(self) -> str:
        """Return the agreement as a sentence."""
        return f"{self.name}: the first {self.same} of {self.num_tokens} greedy tokens of a prompt are {OURS}'s"


def agreements(runs: Sequence[PeerRun]) -> list[Agreement]:
    """Return the agreement of the first run of each other program that gives `greedy_tokens`, if ours does."""
    tokens: dict[str, list[int]] = {}
    for run in runs:
        if run.record is not None and isinstance(run.record.get(GREEDY_TOKENS), list):
            tokens.setdefault(run.name, run.record[GREEDY_TOKENS])
    ours = tokens.pop(OURS, None)
    if ours is None:
        return []
    found = []
    for name, theirs in tokens.items():
        pairs = zip(ours, theirs, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        found.append(Agreement(name=name, same=same, num_tokens=len(ours)))
    return found


def numbers(record: Any) -> Iterator[tuple[str, float]]:
    """Return `{"a_ms": {"1": 2.0}}` as `("a_ms 1", 2.0)`; values that are not numbers are left out."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name} {inner}", number) for inner, number in numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def is_higher_better(metric: str) -> bool | None:
    """Return whether a higher value is better, by the unit in the metric's name."""
    name = metric.partition(" ")[0]
    if name.endswith(HIGHER_IS_BETTER):
        return True
    return False if name.endswith(LOWER_IS_BETTER) else None
