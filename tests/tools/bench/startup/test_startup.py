"""Tests of the row that starts of one kind make: medians, spreads, ratios, and time by phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from piecegraph.tools.bench.startup.startup import COLD, WARM, Start, StartFailed, as_start, start_once, startup_rows


def a_start(seconds: float, caches: str = COLD, **phases: float) -> Start:
    """Return a start; names of phases have `_` for a space."""
    phases = {name.replace("_", " "): own for name, own in phases.items()}
    return Start(
        compiler="inductor",
        caches=caches,
        seconds=seconds,
        phases=phases,
        unnamed_after={"load": seconds - sum(phases.values())},
        spans=phases,
        report={},
        graphs={},
        notes=(),
    )


def test_rows_are_by_kind_with_ratios_to_the_first() -> None:
    starts = [a_start(10), a_start(4, WARM), a_start(12), a_start(6, WARM), a_start(20), a_start(3, WARM)]
    cold, warm = startup_rows(starts)
    assert (cold.name, warm.name) == ("inductor cold", "inductor warm")
    assert (cold.seconds.median, cold.seconds.least, cold.seconds.most) == (12, 10, 20)
    assert cold.of_first == 1
    assert warm.of_first == pytest.approx(4 / 12)


def test_a_phase_that_one_start_lacks_counts_as_nothing_there() -> None:
    (row,) = startup_rows([a_start(10, trace=4, compile=5), a_start(10, trace=2)])
    assert {name: (phase.least, phase.most) for name, phase in row.phases.items()} == {
        "trace": (2, 4),
        "compile": (0, 5),
    }
    assert row.named_share == pytest.approx(0.2)


def test_ours_is_what_is_neither_imports_nor_weights() -> None:
    (row,) = startup_rows([a_start(10, import_torch=3, load=2, trace=1, interpreter=0.5)])
    assert row.own_seconds.median == pytest.approx(4.5)
    assert row.as_record()["own_seconds"]["median"] == pytest.approx(4.5)


def test_a_record_is_handed_out_to_its_phases() -> None:
    record = {
        "begin": 100.0,
        "end": 110.0,
        "full_speed": 140.0,
        "spans": [["trace", 102.0, 108.0], ["import torch", 103.0, 105.0], ["trace", 109.0, 109.5]],
        "report": {"num_pieces": 3},
        "graphs": {"device_bytes": 7},
        "notes": ["a note"],
    }
    start = as_start(record, "eager", WARM)
    assert start.name == "eager warm"
    assert start.phases == {"trace": 4.5, "import torch": 2.0}
    assert start.spans == {"trace": 6.5, "import torch": 2.0}
    assert (start.seconds, start.unnamed) == (10.0, 3.5)
    assert start.named_share == pytest.approx(0.65)
    assert start.full_speed_seconds == 40.0


def test_a_fast_start_has_a_row_of_its_own_with_the_time_to_full_speed() -> None:
    fast = replace(a_start(10), mode="fast", full_speed_seconds=25.0)
    rows = {row.name: row.full_speed_seconds.median for row in startup_rows([a_start(10), fast])}
    assert rows == {a_start(10).name: 10.0, fast.name: 25.0}
    assert " fast " in fast.name


def test_a_start_that_fails_says_why_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(
        StartFailed, match=r"a cold start ended with status 3: the folder '.*' has no config\.json"
    ) as failed:
        start_once(str(tmp_path), {"compiler": "eager", "device": "cpu"}, COLD, tmp_path / "caches")
    assert failed.value.exit_code == 3
