from __future__ import annotations

import pytest

from piecegraph.tools.bench.latency import LatencyRow
from piecegraph.tools.bench.passes import (
    Measured,
    Plan,
    StepTime,
    Variant,
    engine_arguments,
    lost_with,
    note,
    pays,
    saving,
    step_time,
    variants,
)

PLAN = Plan(batch_sizes=(32, 1), context=512, steps=128, repeats=5)


def step(batch_size: int, ms: float, spread: float = 0.0, reason: str | None = None) -> StepTime:
    return StepTime(
        batch_size=batch_size,
        mode="FULL" if reason is None else "NONE",
        ms=ms,
        ms_min=ms - spread,
        ms_max=ms + spread,
        kernels=None,
        floor_ms=0.1,
        reason=reason,
    )


def measured(*steps: StepTime, off: str | None = None, matches: dict[str, int] | None = None) -> Measured:
    variant = Variant(name="a variant", compiler="inductor", passes=(), without=off)
    return Measured(variant=variant, num_layers=10, matches=matches or {}, steps=steps)


def test_each_pass_is_off_once_and_all_are_on_first_and_last() -> None:
    found = variants(["a", "b"], "inductor")
    assert [(each.name, each.compiler, each.passes, each.without) for each in found] == [
        ("all passes", "inductor", ("a", "b"), None),
        ("without a", "inductor", ("b",), "a"),
        ("without b", "inductor", ("a",), "b"),
        ("no passes", "inductor", (), None),
        ("eager pieces", "eager", (), None),
        ("all, again", "inductor", ("a", "b"), None),
    ]


def test_without_the_only_pass_is_without_passes() -> None:
    """The variant is measured once; and over eager pieces there is no other eager variant."""
    found = variants(["a"], "eager")
    assert [(each.name, each.without) for each in found] == [
        ("all passes", None),
        ("no passes", "a"),
        ("all, again", None),
    ]


def test_a_saving_is_of_the_step_without_the_pass() -> None:
    found = saving(measured(step(1, 1.0)), measured(step(1, 0.9)), 1)
    assert found.us_a_layer == pytest.approx(10.0)
    assert found.percent == pytest.approx(10.0)


@pytest.mark.parametrize(("spread", "is_noise"), [(0.04, False), (0.06, True)])
def test_spreads_that_overlap_are_noise(spread: float, is_noise: bool) -> None:
    assert saving(measured(step(1, 1.0, spread)), measured(step(1, 0.9, spread)), 1).is_noise is is_noise


@pytest.mark.parametrize(
    ("without_ms", "does"),
    [
        ((1.02, 1.0), True),  # 2 us a layer
        ((1.005, 1.005), False),  # half a microsecond a layer, half a percent
        ((0.9, 1.0), False),  # slower with the pass
        ((1.0, 1.011), True),  # 1.1 us a layer, at the other batch size
    ],
)
def test_a_pass_pays_at_one_batch_size_or_more(without_ms: tuple[float, float], does: bool) -> None:
    everything = measured(step(1, 1.0), step(32, 1.0))
    assert pays(measured(step(1, without_ms[0]), step(32, without_ms[1]), off="a"), everything) is does


def test_a_share_of_a_short_step_pays_too() -> None:
    """A saving of 0.5 us a layer in a step of 0.1 ms is 5 %."""
    assert pays(measured(step(1, 0.1), off="a"), measured(step(1, 0.095))) is True


def test_a_variant_that_leaves_out_no_pass_has_no_verdict() -> None:
    assert pays(measured(step(1, 2.0)), measured(step(1, 1.0))) is None


def test_passes_that_need_another_are_named() -> None:
    everything = measured(step(1, 1.0), matches={"merge": 4, "act": 2, "norm": 5})
    off = measured(step(1, 1.1), off="merge", matches={"act": 0, "norm": 5})
    assert lost_with(off, everything) == {"act": 2}
    assert note(off, everything) == "act loses 2 matches with it"


def test_a_pass_without_matches_and_a_downgrade_are_noted() -> None:
    everything = measured(step(1, 1.0), matches={"moe": 0})
    off = measured(step(1, 1.0, reason="no graph"), step(2, 1.0, reason="no graph"), off="moe")
    assert note(off, everything) == "matches nothing in this model; runs NONE: no graph"


def test_repeats_become_one_row() -> None:
    rows = [
        LatencyRow(
            batch_size=1,
            prefill_tokens=0,
            mode="FULL",
            asked="FULL",
            padded_tokens=1,
            ms=ms,
            ms_p10=ms,
            ms_p90=ms,
            launches=None,
            kernels=3,
            floor_ms=0.5,
            reason=None,
        )
        for ms in (1.2, 1.0, 1.1)
    ]
    found = step_time(rows)
    assert (found.ms, found.ms_min, found.ms_max, found.kernels) == (1.1, 1.0, 1.2, 3)


def test_an_engine_is_made_for_the_sizes_that_are_timed() -> None:
    everything, *_, eager, _again = variants(["a", "b"], "inductor")
    made = engine_arguments({"dtype": "bfloat16", "compile_sizes": (1,)}, everything, PLAN)
    assert made["cudagraph_capture_sizes"] == (1, 32)
    assert made["compile_sizes"] == (1,)
    assert (made["max_num_seqs"], made["dtype"], made["compiler"]) == (32, "bfloat16", "inductor")
    assert made["compilation_config"] == {"passes": ("a", "b")}
    assert made["num_kv_blocks"] * 16 > 32 * made["max_model_len"]
    assert engine_arguments({}, everything, PLAN)["compile_sizes"] == (1,)
    assert "compile_sizes" not in engine_arguments({"compile_sizes": (1,)}, eager, PLAN)


def test_other_compile_options_are_kept() -> None:
    given = {"compilation_config": {"passes": ("b",), "compile_workers": 0}}
    made = engine_arguments(given, variants(["a", "b"], "inductor")[0], PLAN)
    assert made["compilation_config"] == {"passes": ("a", "b"), "compile_workers": 0}
