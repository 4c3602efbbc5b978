"""Tests of programs run side by side: figures by name, ratios in the direction of the unit, failures with a reason."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.compare.compare import (
    OURS,
    Peer,
    PeerRun,
    compare,
    compare_rows,
    is_higher_better,
    numbers,
    parse_peer,
    run_peer,
)


def python(code: str, name: str = "peer") -> Peer:
    return Peer(name, (sys.executable, "-c", code))


def a_run(name: str, **record: object) -> PeerRun:
    return PeerRun(name=name, record=record, reason=None, seconds=1.0)


def test_a_peer_is_a_name_and_the_words_of_a_command() -> None:
    assert parse_peer("vllm=env A=1 python bench.py 'a b' {model}") == Peer(
        "vllm", ("env", "A=1", "python", "bench.py", "a b", "{model}")
    )


@pytest.mark.parametrize("text", ["vllm", "=python x.py", "vllm=", "vllm='python x.py"])
def test_a_malformed_peer_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="peer"):
        parse_peer(text)


def test_the_last_line_is_what_a_program_found() -> None:
    run = run_peer(python("print('loading'); print('{\"tpot_ms\": {\"1\": 2.5}}'); print()"), 60)
    assert run.record == {"tpot_ms": {"1": 2.5}}
    assert run.reason is None


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (python("import sys; print('x', file=sys.stderr); sys.exit(3)"), "it ended with status 3: x"),
        (
            python("print('late', file=__import__('sys').stderr); raise ValueError('it is')"),
            "it ended with status 1: Val",
        ),
        (
            python("import os; os.write(2, b'[rank0]: NotImplementedError: no\\nwarnings.warn(x)\\n'); os._exit(1)"),
            "it ended with status 1: [rank0]: NotImplementedError: no",
        ),
        (python("print('half a {')"), "its last line is not a JSON object: 'half a {'"),
        (python("print([1])"), "its last line is not a JSON object: '[1]'"),
        (python(""), "its last line is not a JSON object: ''"),
        (Peer("gone", ("a-program-there-is-none-of",)), "it cannot be started: "),
    ],
)
def test_a_program_that_fails_is_a_reason(peer: Peer, reason: str) -> None:
    run = run_peer(peer, 60)
    assert run.record is None
    assert run.reason is not None and run.reason.startswith(reason)


@pytest.mark.slow
def test_one_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    """Its child processes are ended too: the next program needs a GPU that they hold."""
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    run = run_peer(python(code), 5)
    assert run.reason == "it took longer than 5 s"
    state = Path(f"/proc/{file.read_text()}/stat")
    is_gone = not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    if not is_gone:
        os.kill(int(file.read_text()), signal.SIGKILL)
    assert is_gone


def test_programs_take_turns() -> None:
    told: list[tuple[int, int, str]] = []
    peers = [python("print({})", "a"), python("print({})", "b")]
    runs = compare(peers, repeats=2, timeout_s=60, on_run=lambda *what: told.append(what))
    assert [run.name for run in runs] == ["a", "b", "a", "b"]
    assert told == [(1, 4, "a"), (2, 4, "b"), (3, 4, "a"), (4, 4, "b")]


def test_numbers_are_found_by_path_and_nothing_else_is() -> None:
    record = {"peer": "x", "eager": True, "cc": None, "tpot_ms": {"1": 2, "8": 2.5}, "prefill_tok_s": 100}
    assert list(numbers(record)) == [("tpot_ms 1", 2.0), ("tpot_ms 8", 2.5), ("prefill_tok_s", 100.0)]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("tpot_ms 8", False), ("init_s", False), ("peak_gib", False), ("prefill_tok_s", True), ("layers", None)],
)
def test_the_unit_says_what_is_better(metric: str, expected: bool | None) -> None:
    assert is_higher_better(metric) is expected


def test_a_ratio_says_how_many_times_better_ours_is() -> None:
    ours = a_run(OURS, tpot_ms={"1": 1.0}, prefill_tok_s=300.0, layers=3, floors={"tpot_ms": {"1": 0.5}})
    rows = {
        row.metric: row for row in compare_rows([ours, a_run("x", tpot_ms={"1": 2.0}, prefill_tok_s=100.0, layers=3)])
    }
    assert set(rows) == {"tpot_ms 1", "prefill_tok_s", "layers"}
    assert rows["tpot_ms 1"].ratio("x") == 2
    assert rows["prefill_tok_s"].ratio("x") == 3
    assert rows["layers"].ratio("x") is None
    assert (rows["tpot_ms 1"].floor, rows["tpot_ms 1"].share_of_floor) == (0.5, 0.5)
    assert rows["prefill_tok_s"].share_of_floor is None


def test_a_floor_of_a_rate_is_its_most() -> None:
    (row,) = compare_rows([a_run(OURS, prefill_tok_s=300.0, floors={"prefill_tok_s": 400.0})])
    assert row.share_of_floor == 0.75


def test_several_runs_are_a_median_and_a_spread() -> None:
    runs = [a_run(OURS, tpot_ms={"1": ms}) for ms in (3.0, 1.0, 2.0)]
    (row,) = compare_rows(runs)
    figure = row.figures[OURS]
    assert (figure.median, figure.least, figure.most) == (2, 1, 3)


def test_what_one_program_lacks_has_no_ratio() -> None:
    failed = PeerRun(name="x", record=None, reason="why", seconds=1.0)
    (row,) = compare_rows([a_run(OURS, init_s=1.0), failed])
    assert row.ratio("x") is None
    (row,) = compare_rows([failed, a_run("y", init_s=1.0)])
    assert row.ratio("y") is None and row.share_of_floor is None
