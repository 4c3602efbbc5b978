"""Tests of `piecegraph bench`: rows of `latency` and `throughput`, and modes that ran instead of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecegraph.tools.cli import main
from piecegraph.tools.commands.bench_throughput import throughput
from tests.runner.data_parallel.engines_in_threads import engines_are_threads
from tests.runner.tiny_models import llama_config, random_model, save
from tests.tools.bench.assumed_ceilings import assume_ceilings

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

LLM_FLAGS = [
    *("--compiler", "eager", "--device", "cpu", "--dtype", "float32", "--quiet"),
    *("--attention-backend", "triton", "--graph-kind", "recorded", "--cudagraph-capture-sizes", "1,2,4"),
]
FLAGS = ["--context", "8", "--steps", "4", *LLM_FLAGS]
WORKLOAD = ["--num-requests", "5", "--prompt-tokens", "4:12", "--output-tokens", "3:6", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(llama_config()), tmp_path_factory.mktemp("bench"))


@pytest.fixture(autouse=True)
def ceilings_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    assume_ceilings(monkeypatch)


def test_json_has_every_row_and_the_environment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", str(folder), "--batch-size", "1", "--batch-size", "3", "--json", *FLAGS]) == 0
    record = json.loads(capsys.readouterr().out)
    ran = [(row["batch_size"], row["mode"], row["padded_tokens"]) for row in record["rows"]]
    assert ran == [
        *((1, "FULL", 1), (1, "PIECEWISE", 1), (1, "NONE", 1)),
        *((3, "FULL", 3), (3, "PIECEWISE", 4), (3, "NONE", 3)),
    ]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 and row["reason"] is None for row in record["rows"])
    assert {"ceilings", "environment", "graphs", "phases", "report"} <= set(record)


@pytest.mark.slow
def test_a_downgrade_is_shown_with_its_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--attention-backend", "sdpa"]
    assert main(["bench", "latency", str(folder), "--batch-size", "1", "--mode", "full", *flags]) == 0
    out = capsys.readouterr().out
    assert " 1 PIECEWISE " in out
    assert "ceilings: " in out


@pytest.mark.slow
def test_requests_that_do_not_fit_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--max-model-len", "10"]
    assert main(["bench", "latency", str(folder), "--batch-size", "1", *flags]) == 3
    assert "tokens a request do not fit max_model_len=10; raise it." in capsys.readouterr().err


def test_latency_of_stages_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "shape:qwen3-0.6b", "--pipeline-parallel-size", "2"]) == 3
    assert "use `piecegraph bench throughput`" in capsys.readouterr().err


@pytest.mark.slow
def test_the_share_of_a_rank_is_timed_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its floor is below the time that reading the weights of the whole takes."""
    command = ["bench", "latency", str(folder), "--batch-size", "1", "--mode", "none", "--json", *FLAGS]
    assert main([*command, "--shard-of", "2"]) == 0
    record = json.loads(capsys.readouterr().out)
    named = random_model(llama_config()).named_parameters()
    weights = sum(each.nbytes for name, each in named if each.dim() == 2 and "embed" not in name)
    assert record["shard_of"] == 2
    assert 0 < record["rows"][0]["floor_ms"] < 1e3 * weights / record["ceilings"]["read_bytes_per_s"]
    assert main([*command, "--shard-of", "2", "--tensor-parallel-size", "2"]) == 3
    assert "leave tensor_parallel_size and data_parallel_size out" in capsys.readouterr().err


@pytest.mark.slow
def test_engines_have_a_row_each_batch_and_a_note(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both benches run with several engines, and say how figures are theirs."""
    engines = ["--data-parallel-size", "2", "--json", "--kv-cache-memory-bytes", "1000000", *LLM_FLAGS]
    latency = ["--batch-size", "3", "--mode", "none", "--context", "8", "--steps", "2"]
    with engines_are_threads():
        assert main(["bench", "latency", str(folder), *latency, *engines]) == 0
        record = json.loads(capsys.readouterr().out)
        assert main(["bench", "throughput", str(folder), *WORKLOAD[:-2], "--temperature", "0", *engines]) == 0
        records = [record, json.loads(capsys.readouterr().out)]
    assert [len(each["rows"]) for each in records] == [1, 1]
    assert "spread over 2 engines" in records[0]["notes"][-1]
    assert "figures are of 2 engines together" in records[1]["notes"][-1]
    assert len(records[1]["rows"][0]["steps_by_engine"]) == 2
    assert all({"report", "graphs", "ceilings"} <= set(each) for each in records)


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [
        ("latency", ["--enable-expert-parallel"], "engines that share experts agree on each step"),
        ("throughput", ["--profile"], "a clock around the host's work of one engine"),
        ("passes", [], "reads the counters, graphs and model of one engine"),
    ],
)
def test_what_needs_an_engine_in_this_process_is_refused_with_several(
    bench: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", bench, "shape:qwen3-0.6b", "--data-parallel-size", "2", *options]) == 3
    assert message in capsys.readouterr().err


def test_throughput_in_json_has_every_run_the_floor_and_the_environment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "throughput", str(folder), *WORKLOAD, "--shared-prefix", "20", "--repeat", "2", "--profile"]
    assert main([*command, "--json", *LLM_FLAGS]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {
        *("model", "workload", "warm_up", "ceilings", "rows", "profiles", "phases", "report", "graphs", "notes"),
        "environment",
    }
    assert record["workload"] == {
        "num_requests": 5,
        "prompt_tokens": [4, 12],
        "output_tokens": [3, 6],
        "shared_prefix": 20,
        "seed": 0,
    }
    assert [row["temperature"] for row in record["rows"]] == [0.0, 0.6]
    for row in record["rows"]:
        assert len(row["runs"]) == 2
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert 5 * (20 + 4) <= row["prompt_tokens"] <= 5 * (20 + 12)
        assert 5 * 3 <= row["output_tokens"] <= 5 * 6
        assert row["total_tokens_per_s"] > row["output_tokens_per_s"] > 0
        assert row["steps"] == sum(row["steps_by_mode"].values())
        assert row["floor_s"] > 0
        assert row["share_of_floor"] == pytest.approx(row["floor_s"] / row["seconds"])
    for profile in record["profiles"]:
        assert profile["batch_size"] == 4
        assert set(profile["step_ms"]) == {"mean", "p90"}
        assert "execute_model" in profile["parts_ms"]
        assert profile["gpu"] is None


@pytest.mark.slow
def test_throughput_as_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is a line for each temperature with the floor beside it; then the profile, the rates and the warm-up."""
    command = ["bench", "throughput", str(folder), *WORKLOAD, "--temperature", "0.6", "--profile"]
    assert main([*command, *LLM_FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, row = lines[0].split(), lines[1].split()
    assert header[:2] == ["temp", "seconds"]
    assert header[-3:] == ["of", "floor", "modes"]
    assert row[0] == "0.6"
    assert " FULL " in lines[1]
    assert lines[2].startswith("profile at temperature 0.6: ")
    assert "decode steps of 4, floor " in lines[2]
    assert [line.split()[0] for line in lines[3:8]] == ["ms", "step", "host", "schedule", "execute"]
    assert lines[-2].startswith("ceilings: ")
    assert lines[-1].startswith("warm-up: the same prompts")


@pytest.mark.slow
def test_throughput_of_requests_that_do_not_fit_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-model-len", "10", *WORKLOAD, *LLM_FLAGS]
    assert main(["bench", "throughput", str(folder), *flags]) == 3
    assert "does not fit max_model_len=10; raise it" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["20:10", "0:5", "4:5:6", "few"])
def test_a_range_that_is_none_is_refused(given: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", str(folder), "--prompt-tokens", given]) == 2
    assert f"'{given}'" in capsys.readouterr().err


def test_a_config_file_may_give_ranges_as_text_list_or_number(tmp_path: Path) -> None:
    """A file takes the values that the command line takes."""
    given = {'"4:9"': (4, 9), "[4, 9]": (4, 9), "7": (7, 7)}
    for text, expected in given.items():
        file = tmp_path / "bench.toml"
        file.write_text(f"prompt_tokens = {text}\n")
        with throughput.make_context("throughput", ["model", "--config", str(file)]) as ctx:
            assert ctx.params["prompt_tokens"] == expected
            assert ctx.params["output_tokens"] == (100, 1024)
