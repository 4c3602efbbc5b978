"""Tests that a record of measurements becomes SVG files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.growth.plot_costs import as_plot, main, where_from, write_plots
from piecegraph.tools.bench.growth.svg_plot import Line, Plot

BATCH = Plot(
    name="batch",
    title="by batch",
    x="requests",
    y="ms",
    lines=(Line("FULL", ((1.0, 0.5), (2.0, 0.75))), Line("floor", ((1.0, 0.25),), is_reference=True)),
)
DEPTH = Plot(name="depth", title="by depth", x="layers", y="s", lines=(Line("trace", ((4.0, 1.0),)),), is_log=False)


def a_record(folder: Path) -> Path:
    file = folder / "growth.json"
    environment = {"gpus": "a GPU", "packages": {"torch": "2.11", "click": "8"}}
    record = {"model": "shape:x", "plots": [asdict(BATCH), asdict(DEPTH)], "environment": environment}
    file.write_text(json.dumps(record))
    return file


def test_a_file_a_plot_the_same_each_time(tmp_path: Path) -> None:
    written = CliRunner().invoke(main, [str(a_record(tmp_path)), str(tmp_path / "figures")])
    assert written.exit_code == 0
    files = [Path(line) for line in written.output.split()]
    assert [file.name for file in files] == ["cost_batch.svg", "cost_depth.svg"]
    before = [file.read_bytes() for file in files]
    assert b"shape:x, a GPU, torch 2.11</text>" in before[0]
    write_plots(tmp_path / "growth.json", tmp_path / "figures")
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize("plot", [BATCH, DEPTH])
def test_a_plot_survives_json(plot: Plot) -> None:
    assert as_plot(json.loads(json.dumps(asdict(plot)))) == plot


@pytest.mark.parametrize("text", ["no json", "{}", '{"plots": [{"name": "x"}]}', '{"plots": 3}'])
def test_a_file_without_plots_is_refused_and_nothing_is_written(text: str, tmp_path: Path) -> None:
    file = tmp_path / "growth.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not a record of plots"):
        write_plots(file, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_a_record_may_say_little_of_where_it_is_from() -> None:
    assert where_from({}) == ""
    assert where_from({"model": "m", "environment": {"cpu": "AVX2, 2 threads"}}) == "m, AVX2, 2 threads"
