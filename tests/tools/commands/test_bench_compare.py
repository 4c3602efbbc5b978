"""Tests of `piecegraph bench compare`: one table of ours and of others, whichever of them fails."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from piecegraph.tools.bench.compare.compare import OURS, Peer, PeerRun
from piecegraph.tools.cli import main
from piecegraph.tools.commands.bench_compare import as_lines, compare, name_of, with_job
from tests.runner.tiny_models import llama_config

FLAGS = [
    *("--compiler", "eager", "--device", "cpu", "--load-format", "dummy", "--quiet"),
    *("--batch-size", "1", "2", "--prompt-tokens", "8", "--decode-tokens", "3", "--prefill", "2", "16"),
    *("--num-requests", "0"),
]


@pytest.mark.slow
def test_one_table_with_a_peer_and_one_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours really runs; a peer gets the folder and reports its figures; another's failure is a reason, not the end."""
    llama_config().save_pretrained(str(tmp_path))
    script = tmp_path / "bench.py"
    script.write_text("import json, sys\nprint(json.dumps({'model': sys.argv[1], 'tpot_ms': {'1': 1e6}}))\n")
    peer = f"slow={shlex.quote(sys.executable)} {script} {{model}}"
    command = ["bench", "compare", str(tmp_path), "--peer", peer, "--json", *FLAGS, "--", sys.executable, "gone.py"]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"model", "job", "rows", "failures", "runs", "agreements", "environment"}
    assert [run["name"] for run in record["runs"]] == [OURS, "slow", "gone"]
    assert record["runs"][1]["record"]["model"] == str(tmp_path)
    (failure,) = record["failures"]
    assert failure["name"] == "gone" and "it ended with status 2" in failure["reason"]
    rows = {row["metric"]: row for row in record["rows"]}
    assert rows["tpot_ms 1"]["ratios"]["slow"] == pytest.approx(1e6 / rows["tpot_ms 1"]["figures"][OURS]["median"])
    assert 0 < rows["tpot_ms 2"]["share_of_floor"] < 1


@pytest.mark.slow
def test_only_ours_decides_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", str(tmp_path), *FLAGS]) == 1
    assert "piecegraph FAILED after" in capsys.readouterr().out


@pytest.mark.parametrize("peers", [["a=x", "a=y"], ["piecegraph=x"]])
def test_two_of_one_name_are_refused(peers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [word for peer in peers for word in ("--peer", peer)]
    assert main(["bench", "compare", "shape:qwen3-0.6b", *given]) == 2
    assert "two programs are called" in capsys.readouterr().err


def test_a_config_file_may_have_the_peers(tmp_path: Path) -> None:
    file = tmp_path / "peers.toml"
    file.write_text('peers = ["a=one {model}", "b=two"]\nprefill = [2, 64]\n')
    with compare.make_context("compare", ["model", "--config", str(file)]) as ctx:
        assert ctx.params["peers"] == ("a=one {model}", "b=two")
        assert ctx.params["prefill"] == (2, 64)
    file.write_text('peers = "a=one and more"\n')
    with compare.make_context("compare", ["model", "--config", str(file)]) as ctx:
        assert ctx.params["peers"] == ("a=one and more",)


def test_flags_after_two_dashes_are_the_programs() -> None:
    words = ["model", "--batch-size", "1", "8", "--", "python", "x.py", "--batch-size", "4", "5"]
    with compare.make_context("compare", words) as ctx:
        assert ctx.params["batch_sizes"] == (1, 8)
        assert ctx.params["command"] == ("python", "x.py", "--batch-size", "4", "5")


def test_names_and_commands() -> None:
    assert name_of(("python", "-u", "some/vllm_bench.py", "x")) == "vllm_bench"
    assert name_of(("/opt/bin/bench", "x")) == "bench"
    peer = with_job(Peer("a", ("python", "--model={model}", "{job}")), "/m", "{}")
    assert peer.command == ("python", "--model=/m", "{}")


def test_the_table() -> None:
    """The table has medians and spreads, floor and ratio beside them, and failures after it."""
    from piecegraph.tools.bench.compare.compare import compare_rows

    runs = [
        PeerRun(name=OURS, record={"tpot_ms": {"1": ms}, "floors": {"tpot_ms": {"1": 0.5}}}, reason=None, seconds=1.0)
        for ms in (0.8, 1.0, 1.2)
    ]
    runs.append(PeerRun(name="x", record={"tpot_ms": {"1": 1.5}, "offline_tok_s": 23456.7}, reason=None, seconds=1.0))
    runs.append(PeerRun(name="y", record=None, reason="it is not there", seconds=2.0))
    head, tpot, offline, *rest = as_lines(compare_rows(runs), runs)
    assert head.split() == ["figure", "piecegraph", "floor", "of", "floor", "x", "ratio", "y", "ratio"]
    assert tpot.split() == ["tpot_ms", "1", "1", "(0.8-1.2)", "0.5", "50%", "1.5", "1.50x", "-", "-"]
    assert offline.split() == ["offline_tok_s", "-", "-", "-", "23,457", "-", "-", "-"]
    assert rest[-1] == "y FAILED after 2.0 s: it is not there"
