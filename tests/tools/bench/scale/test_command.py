from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.scale.command import command, link_of, parse_step_times, read_trace
from piecegraph.tools.bench.scale.simulate import Arrival
from tests.runner.tiny_models import llama_config

STEPS = ["--step-time", "1:10", "--step-time", "64:30", "--num-requests", "8", "--output-len", "4", "--input-len", "3"]


def test_step_times_are_sorted() -> None:
    found = parse_step_times(["8:2.5", "1:1"])
    assert (found.tokens, found.seconds) == ((1, 8), (0.001, 0.0025))


@pytest.mark.parametrize("text", ["8", "0:1", "8:-1", "x:1", "8:nan", "8:inf"])
def test_what_is_no_step_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not TOKENS:MILLISECONDS"):
        parse_step_times([text])


def test_a_link_is_given_or_fitted() -> None:
    given = link_of([], 2, 10.0, 300.0)
    assert (given.alpha_s, given.bytes_per_s) == pytest.approx((1e-5, 3e11))
    fitted = link_of(["1000:3", "2000:4"], 2, 10.0, 300.0)
    assert (fitted.alpha_s, fitted.bytes_per_s) == pytest.approx((1e-6, 1e9))
    with pytest.raises(ConfigError, match="'8192' is not BYTES:MICROSECONDS"):
        link_of(["8192"], 2, 10.0, 300.0)
    with pytest.raises(ConfigError, match="cannot be fitted to --sum-time: a line needs"):
        link_of(["8192:1"], 2, 10.0, 300.0)


def test_no_step_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are no step times"):
        parse_step_times([])


def test_a_trace_is_read_and_sorted(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"at_s": 2, "prompt_tokens": 5, "output_tokens": 1}, {"at_s": 0.5, "prompt_tokens": 3, "output_tokens": 2}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert read_trace(file) == [Arrival(0.5, 3, 2), Arrival(2.0, 5, 1)]
    file.write_text(json.dumps(lines[0]) + "\n{}")
    with pytest.raises(ConfigError, match="line 2 is no request"):
        read_trace(file)
    file.write_text("")
    with pytest.raises(ConfigError, match="has no line"):
        read_trace(file)


def test_a_table_with_its_assumptions(tmp_path: Path) -> None:
    llama_config().save_pretrained(str(tmp_path))
    result = CliRunner().invoke(command, [str(tmp_path), *STEPS], catch_exceptions=False)
    rows = [line for line in result.stdout.splitlines() if "TP" in line and "DP" in line]
    assert len(rows) == 11
    assert rows[-1].split()[0] == "1024"
    assert "memory is not modelled" in result.stdout
    result = CliRunner().invoke(command, [str(tmp_path), *STEPS, "--gpus", "4", "--all", "--json"])
    record = json.loads(result.stdout)
    assert len(record["rows"]) == 6
    assert "divides all of a step's time" in record["assumptions"][0]
    assert record["rows"][0]["tokens_per_s"] >= record["rows"][-1]["tokens_per_s"]


def test_a_share_that_is_as_slow_as_the_whole_leaves_tensor_parallelism_nothing(tmp_path: Path) -> None:
    """With collectives that cost nothing, layouts of one engine then take as long as one device."""
    llama_config().save_pretrained(str(tmp_path))
    free = ["--alpha-us", "0", "--beta-gb-per-s", "1e9", "--json"]
    shard = ["--shard-step-time", "1:10", "--shard-step-time", "64:30"]
    records = [
        json.loads(CliRunner().invoke(command, [str(tmp_path), *STEPS, *free, *shard, *gpus]).stdout)
        for gpus in (["--gpus", "1"], ["--gpus", "2", "--all"])
    ]
    alone, ranks = (
        next(row for row in record["rows"] if row["tensor_parallel_size"] == size)
        for size, record in enumerate(records, start=1)
    )
    assert ranks["tokens_per_s"] == pytest.approx(alone["tokens_per_s"])
    assert "whole remain 10 of 10, 30 of 30 ms in steps of 1, 64 tokens" in records[0]["assumptions"][0]
