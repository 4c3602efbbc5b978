"""`piecegraph bench latency`: a row a batch size and mode, and what ran where something else was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecegraph.tools.cli import main
from tests.runner.tiny_models import llama_config, random_model, save

FLAGS = [
    *("--context", "8", "--steps", "4", "--compiler", "eager", "--device", "cpu", "--dtype", "float32", "--quiet"),
    *("--attention-backend", "triton", "--graph-kind", "recorded", "--cudagraph-capture-sizes", "1,2,4"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(llama_config()), tmp_path_factory.mktemp("bench"))


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


def test_a_downgrade_is_shown_with_its_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--attention-backend", "sdpa"]
    assert main(["bench", "latency", str(folder), "--batch-size", "1", "--mode", "full", *flags]) == 0
    out = capsys.readouterr().out
    assert " 1 PIECEWISE " in out
    assert "ceilings: " in out


def test_requests_that_do_not_fit_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--max-model-len", "10"]
    assert main(["bench", "latency", str(folder), "--batch-size", "1", *flags]) == 3
    assert "tokens a request do not fit max_model_len=10; raise it." in capsys.readouterr().err
