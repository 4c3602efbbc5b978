"""Tests of the points of the growth bench, from a real model and real starts of a tiny shape on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piecegraph.tools.bench.growth.growth import capture_plots, depth_plot, main, num_graphs, spread_sizes
from piecegraph.tools.bench.growth.plot_costs import write_plots
from piecegraph.tools.bench.startup.startup import COLD, Start
from piecegraph.tools.command_line.shapes import SHAPES
from tests.runner.tiny_models import llama_config


def a_start(graphs: dict[str, Any], **spans: float) -> Start:
    return Start(
        compiler="inductor",
        caches=COLD,
        seconds=20,
        phases=spans,
        unnamed_after={},
        spans=spans,
        report={},
        graphs=graphs,
        notes=(),
    )


def graphs(count: int) -> dict[str, Any]:
    both = {mode: {"graphs": count, "seconds": 1.0, "bytes": count * 2**20} for mode in ("FULL", "PIECEWISE")}
    return {**both, "device_bytes": 3 * count * 2**20}


@pytest.mark.parametrize(
    ("count", "expected"), [(1, (8,)), (2, (1, 8)), (3, (1, 3, 8)), (5, (1, 2, 3, 4, 8)), (9, (1, 2, 3, 4, 8))]
)
def test_sizes_are_spread_over_the_ladder(count: int, expected: tuple[int, ...]) -> None:
    assert spread_sizes((1, 2, 3, 4, 8), count) == expected


def test_a_phase_that_no_start_had_has_no_line() -> None:
    plot = depth_plot({4: a_start({}, trace=1.0, compile=5.0), 8: a_start({}, trace=2.0)})
    assert {line.name: line.points for line in plot.lines} == {
        "trace": ((4, 1), (8, 2)),
        "compile": ((4, 5), (8, 0)),
    }


def test_captures_are_by_the_graphs_there_were() -> None:
    few, many = a_start(graphs(1), capture=0.5), a_start(graphs(10), capture=4.0)
    assert num_graphs(many) == 20
    seconds, memory = capture_plots([many, few])
    assert seconds.lines[0].points == ((2, 0.5), (20, 4))
    assert [line.points for line in memory.lines] == [((2, 3), (20, 30)), ((2, 2), (20, 20))]


@pytest.mark.slow
def test_one_call_measures_all_that_is_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)
    monkeypatch.setitem(SHAPES, "tiny", llama_config(max_position_embeddings=512).to_dict())
    out = tmp_path / "growth.json"
    arguments = [
        *("shape:tiny", "--out", str(out), "--compiler", "eager", "--device", "cpu", "--attention-backend", "triton"),
        *("--graph-kind", "recorded", "--cudagraph-capture-sizes", "1,2,4"),
        *("--batch-size", "1", "2", "--context", "8", "16", "--context-batch-size", "1", "--depth", "1", "3"),
        *("--capture-count", "2"),
    ]
    main.main(arguments, standalone_mode=False)
    record = json.loads(out.read_text())
    plots = {plot["name"]: plot for plot in record["plots"]}
    assert list(plots) == ["batch", "context", "depth", "captures", "graph_memory"]
    assert [line["name"] for line in plots["batch"]["lines"]] == ["FULL", "floor", "PIECEWISE"]
    assert [line["name"] for line in plots["context"]["lines"]] == ["batch 1", "floor, batch 1"]
    at = {name: [x for x, _ in plot["lines"][0]["points"]] for name, plot in plots.items()}
    assert at == {
        "batch": [1, 2],
        "context": [8, 16],
        "depth": [1, 3],
        "captures": [4],
        "graph_memory": [4],
    }  # two buckets a mode
    assert [line["name"] for line in plots["depth"]["lines"]] == ["trace", "compile", "capture", "load"]
    assert len(write_plots(out, tmp_path / "figures")) == 5


def test_a_model_whose_depth_cannot_change_is_refused(tmp_path: Path) -> None:
    from piecegraph.errors import UsageError

    with pytest.raises(UsageError, match="is not a shape whose depth can be changed"):
        main.main(["shape:qwen3-0.6b:4", "--out", str(tmp_path / "x.json")], standalone_mode=False)
