"""`piecegraph bench startup`: real processes, from their start to a token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from piecegraph.tools.bench.startup.startup import COLD, WARM, Start, StartFailed, startup_rows
from piecegraph.tools.cli import main
from piecegraph.tools.commands.bench_startup import as_lines
from tests.runner.tiny_models import llama_config

FLAGS = ["--device", "cpu", "--load-format", "dummy", "--quiet", "--max-num-seqs", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama_config().save_pretrained(str(folder))
    return folder


@pytest.mark.slow
def test_json_names_the_time_of_a_cold_and_a_warm_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At least 95 % of each is named: the rest would hide what to improve."""
    assert main(["bench", "startup", str(folder), "--compiler", "eager", "--no-tokenizer", "--json", *FLAGS]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"model", "arguments", "repeat", "rows", "environment"}
    assert [row["name"] for row in record["rows"]] == ["eager cold", "eager warm"]
    for row in record["rows"]:
        (start,) = row["starts"]
        assert {"interpreter", "import torch", "config", "load", "trace", "first_token"} <= set(start["phases"])
        assert sum(start["phases"].values()) + start["unnamed"] == pytest.approx(start["seconds"])
        assert row["named_share"] >= 0.95
        assert len(start["report"]["unique_pieces"]) == start["report"]["num_unique_pieces"] > 1
    assert record["rows"][0]["of_first"] == 1


def test_a_model_that_is_none_is_refused_as_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a start fails, the command does; `test_startup.py` has a start that really does."""

    def fail(model: str, *rest: object) -> Start:
        raise StartFailed(f"a cold start ended with status 3: the folder {model!r} has no config.json", 3)

    monkeypatch.setattr("piecegraph.tools.bench.startup.startup.start_once", fail)
    assert main(["bench", "startup", str(tmp_path), "--compiler", "eager", *FLAGS]) == 3
    assert "has no config.json" in capsys.readouterr().err
    assert main(["bench", "startup", "shape:qwen3-0.6", *FLAGS]) == 3
    assert "Did you mean 'qwen3-0.6b'?" in capsys.readouterr().err


def a_start(caches: str, seconds: float, **phases: float) -> Start:
    pieces = [{"index": 0, "shared_by": 2, "compile_seconds": 1.5}]
    hit = {"state": "hit", "reason": "", "loaded_pieces": 3, "load_seconds": 0.25}
    cache = {"state": "miss", "reason": "no such entry"} if caches == COLD else hit
    return Start(
        compiler="inductor",
        caches=caches,
        seconds=seconds,
        phases=phases,
        unnamed_after={"load": seconds - sum(phases.values())},
        spans=phases,
        report={"unique_pieces": pieces, "cache": cache},
        graphs={},
        notes=("a note",),
    )


def test_the_table() -> None:
    """A line a phase, a column a kind, what is unnamed, the sum, the ratio, what a thread did beside; then the pieces,
    and each note once."""
    cold, warm = a_start(COLD, 10, load=1.0, compile=8.0), a_start(WARM, 2, load=1.0, artifact_load=0.5)
    warm = replace(warm, spans={**warm.spans, "step_kernels": 0.75})
    again = a_start(COLD, 12, load=1.0, compile=10.0)
    lines = list(as_lines(list(startup_rows([cold, warm, again]))))
    cells = {line[:20].strip(): line[20:].split() for line in lines[:12]}
    assert cells["compile"] == ["9.00", "(8.00-10.00)", "-"]
    assert cells["artifact load"] == ["-", "0.50"]
    assert cells["unnamed"] == ["1.00", "0.50"]
    assert cells["- after load"] == cells["unnamed"]
    assert cells["to the first token"] == ["11.00", "(10.00-12.00)", "2.00"]
    assert cells["of that ours"] == ["10.00", "(9.00-11.00)", "1.00"]
    assert cells["of the first column"] == ["1.00x", "0.18x"]
    assert cells["beside: step kernels"] == ["-", "0.75"]
    assert lines[-4:] == [
        "inductor cold: cache miss: no such entry",
        "inductor cold: piece 0 (shared by 2) compiled in 1.50 s",
        "inductor warm: cache hit, 3 pieces loaded in 0.25 s",
        "note: a note",
    ]
