"""`piecegraph bench passes` over eager pieces, on a CPU: every variant, every table."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.passes import Measured, measure_passes
from piecegraph.tools.cli import main
from tests.runner.tiny_models import llama_config
from tests.tools.bench.assumed_ceilings import assume_ceilings

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

FLAGS = [
    *("--compiler", "eager", "--device", "cpu", "--quiet", "--load-format", "dummy"),
    *("--attention-backend", "triton", "--graph-kind", "recorded", "--passes", "merge-projections"),
    *("--context", "8", "--steps", "3", "--repeat", "2", "--batch-size", "1", "--batch-size", "2"),
]


@pytest.fixture(autouse=True)
def libraries_keep_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command quietens its own process, which here is that of the tests."""
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)
    assume_ceilings(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama_config(num_hidden_layers=3).save_pretrained(str(folder))
    return folder


@dataclass(frozen=True)
class Ran:
    """What the command measured, and what it printed of it."""

    measured: tuple[list[Measured], Ceilings]
    out: str


@pytest.fixture(scope="module")
def ran(folder: Path) -> Ran:
    found: list[tuple[list[Measured], Ceilings]] = []

    def measure(*arguments: Any, **options: Any) -> tuple[list[Measured], Ceilings]:
        found.append(measure_passes(*arguments, **options))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)
        assume_ceilings(patch)
        patch.setattr("piecegraph.tools.bench.passes.measure_passes", measure)
        assert main(["bench", "passes", str(folder), "--json", *FLAGS]) == 0
    return Ran(found[0], out.getvalue())


@pytest.mark.slow
def test_json_has_every_variant_and_the_environment(ran: Ran) -> None:
    record = json.loads(ran.out)
    assert set(record) == {"model", "plan", "ceilings", "variants", "environment"}
    everything, none, again = record["variants"]
    assert [each["variant"]["name"] for each in record["variants"]] == ["all passes", "no passes", "all, again"]
    assert everything["matches"] == {"merge-projections": 6}
    assert none["matches"] == {}
    assert (none["variant"]["without"], type(none["pays"]), everything["pays"]) == ("merge-projections", bool, None)
    for each in record["variants"]:
        assert each["num_layers"] == 3
        assert [(row["batch_size"], row["mode"]) for row in each["steps"]] == [(1, "FULL"), (2, "FULL")]
        assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in each["steps"])
        assert [row["batch_size"] for row in each["savings"]] == [1, 2]
    for each in (everything, none):
        pieces = [(row["unique"], row["pieces"], row["batch_size"]) for row in each["pieces"]]
        assert pieces == [(u, p, size) for size in (1, 2) for u, p in ((0, [0]), (1, [1, 2]), (2, [3]), (3, [4]))]
        assert all(row["us_per_step"] == pytest.approx(row["us"] * len(row["pieces"])) for row in each["pieces"])
    assert again["pieces"] == []


def test_the_tables(
    ran: Ran, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same measurement as tables."""
    monkeypatch.setattr("piecegraph.tools.bench.passes.measure_passes", lambda *arguments, **options: ran.measured)
    assert main(["bench", "passes", str(folder), *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 layers; ")
    assert lines[1].split()[:3] == ["variant", "batch", "ms/step"]
    assert [line.split("  ")[0].strip() for line in lines if line.startswith("all passes  ")] == ["all passes"] * 2
    (first, second) = (line for line in lines if line.startswith("compile-worth at batch "))
    assert first.startswith("compile-worth at batch 1: no passes ")
    assert first.endswith("x")
    assert second.startswith("compile-worth at batch 2: ")
    assert sum(line.strip().startswith("no passes") and "unique 1, 2 pieces 1..2" in line for line in lines) == 1
    assert sum("all pieces of a step" in line for line in lines) == 2


@pytest.mark.slow
def test_without_pieces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "passes", str(folder), "--no-pieces", *FLAGS]) == 0
    assert "each piece alone" not in capsys.readouterr().out


def test_a_pass_there_is_none_of_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "passes", "shape:qwen3-0.6b", "--passes", "merge-projection"]) == 2
    assert "Did you mean 'merge-projections'?" in capsys.readouterr().err
