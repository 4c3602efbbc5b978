"""Measure what each pass saves: the same decode step with and without it, beside what compiling saves."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.progress import OnPhase
from piecegraph.runner.attention.interface.layer import attention_layers
from piecegraph.runner.common.config_on_device import DEFAULT_COMPILE_SIZES
from piecegraph.runner.llm import LLM
from piecegraph.tools.bench.latency import LatencyRow, measure_latency
from piecegraph.tools.bench.measure.ceilings import Ceilings, measure_ceilings
from piecegraph.tools.bench.pieces import PieceTime, measure_pieces

ALL, AGAIN, NONE, EAGER = "all passes", "all, again", "no passes", "eager pieces"

PAYS_PERCENT = 3.0
PAYS_US_A_LAYER = 1.0
"""A pass pays if it saves this share of a step, or this time a layer, at one batch size or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to compile the model."""

    name: str
    compiler: str
    passes: tuple[str, ...]
    without: str | None = None  # the pass that is off


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A decode step of one variant at one batch size."""

    batch_size: int
    mode: str
    ms: float  # the median over repeats, each the mean of its steps
    ms_min: float
    ms_max: float
    kernels: int | None  # of a whole step, by torch's profiler; None on a CPU
    floor_ms: float
    reason: str | None  # for a mode that was not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A variant and its times."""

    variant: Variant
    num_layers: int
    matches: dict[str, int]  # of each pass that ran
    steps: tuple[StepTime, ...]  # by batch size, as asked for
    pieces: tuple[PieceTime, ...] = ()

    def at(self, batch_size: int) -> StepTime:
        return next(step for step in self.steps if step.batch_size == batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The time that all passes together save over a variant, at one batch size."""

    batch_size: int
    us_a_layer: float
    percent: float  # of the variant's step
    is_noise: bool  # the spreads of both overlap

    @property
    def pays(self) -> bool:
        return self.percent >= PAYS_PERCENT or self.us_a_layer >= PAYS_US_A_LAYER


def variants(names: Sequence[str], compiler: str) -> tuple[Variant, ...]:
    """Return the variants, with all passes first and last: the difference of the two shows the machine's drift."""
    passes = tuple(names)
    found = [Variant(name=ALL, compiler=compiler, passes=passes)]
    found += [
        Variant(name=f"without {off}", compiler=compiler, passes=tuple(n for n in passes if n != off), without=off)
        for off in passes
        if len(passes) > 1
    ]
    found.append(Variant(name=NONE, compiler=compiler, passes=(), without=passes[0] if len(passes) == 1 else None))
    if compiler != "eager":
        found.append(Variant(name=EAGER, compiler="eager", passes=()))
    return (*found, Variant(name=AGAIN, compiler=compiler, passes=passes))


def saving(variant: Measured, everything: Measured, batch_size: int) -> Saving:
    """Return what `everything`, the variant with all passes, saves over another variant."""
    slow, fast = variant.at(batch_size), everything.at(batch_size)
    return Saving(
        batch_size=batch_size,
        us_a_layer=1e3 * (slow.ms - fast.ms) / everything.num_layers,
        percent=100 * (slow.ms - fast.ms) / slow.ms,
        is_noise=slow.ms_min <= fast.ms_max and fast.ms_min <= slow.ms_max,
    )


def pays(variant: Measured, everything: Measured) -> bool | None:
    """Return whether the pass that `variant` leaves out saves time at one batch size or more; None if it leaves out
    none.
    """
    if variant.variant.without is None:
        return None
    return any(saving(variant, everything, step.batch_size).pays for step in variant.steps)


def lost_with(variant: Measured, everything: Measured) -> dict[str, int]:
    """Return the passes that match less often than with all passes on, and how much less.

    These passes need what the pass that is off makes.
    """
    return {
        name: everything.matches[name] - count
        for name, count in variant.matches.items()
        if count < everything.matches.get(name, 0)
    }


def note(variant: Measured, everything: Measured) -> str:
    """Return what a reader of the variant's figures has to know."""
    lost = [f"{name} loses {count} matches with it" for name, count in lost_with(variant, everything).items()]
    off = variant.variant.without
    if off is not None and everything.matches.get(off) == 0:
        lost.insert(0, "matches nothing in this model")
    lost += dict.fromkeys(f"runs {step.mode}: {step.reason}" for step in variant.steps if step.reason)
    return "; ".join(lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings with which every variant is measured."""

    batch_sizes: tuple[int, ...]
    context: int  # tokens a request has before the first step
    steps: int  # timed in a row
    repeats: int  # of that
    with_pieces: bool = True  # each piece alone too, of the variants that show what compiling is worth


def measure_passes(
    model: str,
    arguments: Mapping[str, Any],
    chosen: Sequence[Variant],
    plan: Plan,
    *,
    on_phase: OnPhase | None = None,
    on_measured: Callable[[Measured], None] = lambda measured: None,
) -> tuple[list[Measured], Ceilings]:
    """Time every variant in this process, one engine after the other with the same weights.

    Random weights come from one seed. `arguments` are those of `LLM`, without `compiler`; passes in its
    `compilation_config` are not read.
    """
    ceilings: Ceilings | None = None
    found = []
    for variant in chosen:
        with LLM(model, on_phase=on_phase, **engine_arguments(arguments, variant, plan)) as llm:
            if ceilings is None:
                cache = next(iter(llm.runner.step.kv_caches.values()))
                ceilings = measure_ceilings(llm.runner.step.buffers.input_ids.device, cache.key.dtype)
            found.append(_measured(llm, variant, plan, ceilings))
        on_measured(found[-1])
        del llm
        gc.collect()  # an engine is full of cycles, and the next one needs its memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    assert ceilings is not None, "there is always a variant"
    return found, ceilings


def engine_arguments(arguments: Mapping[str, Any], variant: Variant, plan: Plan) -> dict[str, Any]:
    """Return `LLM`'s arguments for a variant.

    Graphs are captured for the timed batch sizes only, and static pieces for those of them that have some by default.
    """
    sizes = tuple(sorted(set(plan.batch_sizes)))
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": sizes,
        "max_model_len": plan.context + plan.steps + 64,
        "max_num_seqs": sizes[-1],
    }
    if variant.compiler != "eager":
        defaults["compile_sizes"] = tuple(size for size in sizes if size in DEFAULT_COMPILE_SIZES)
    made = {**defaults, **arguments, "compiler": variant.compiler}
    if variant.compiler == "eager":
        made.pop("compile_sizes", None)
    if made["max_model_len"] is not None:
        blocks = -(-(made["max_model_len"] + 1) // made.get("block_size", 16)) + 1
        made.setdefault("num_kv_blocks", blocks * (sizes[-1] + 1))
    made["compilation_config"] = {**made.get("compilation_config", {}), "passes": variant.passes}
    return made


def _measured(llm: LLM, variant: Variant, plan: Plan, ceilings: Ceilings) -> Measured:
    rows = measure_latency(
        llm,
        plan.batch_sizes,
        [CUDAGraphMode.FULL] * plan.repeats,
        context=plan.context,
        steps=plan.steps,
        ceilings=ceilings,
    )
    pieces: list[PieceTime] = []
    if plan.with_pieces and variant.name in (ALL, NONE, EAGER):
        for batch_size in plan.batch_sizes:
            pieces += measure_pieces(llm, batch_size, context=plan.context, runs=plan.steps)
    return Measured(
        variant=variant,
        num_layers=max(1, len(attention_layers(llm.compiled.split_calls))),
        matches={row.name: row.matches for row in llm.compiled.report().passes},
        steps=tuple(step_time([row for row in rows if row.batch_size == size]) for size in plan.batch_sizes),
        pieces=tuple(pieces),
    )


def step_time(rows: Sequence[LatencyRow]) -> StepTime:
    """Return the repeats of one batch size as one row."""
    each = [row.ms for row in rows]
    return StepTime(
        batch_size=rows[0].batch_size,
        mode=rows[0].mode,
        ms=statistics.median(each),
        ms_min=min(each),
        ms_max=max(each),
        kernels=rows[-1].kernels,
        floor_ms=rows[0].floor_ms,
        reason=rows[0].reason,
    )
