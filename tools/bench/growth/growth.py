"""Measure how cost grows with batch, context, depth and the number of capture sizes, into one JSON file for
`plot_costs`.

`python -m piecegraph.tools.bench.growth.growth shape:qwen3-0.6b --out growth.json` takes less than five minutes on a
GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from piecegraph.compiler.common.private_folder import scratch_folder
from piecegraph.errors import UsageError
from piecegraph.progress import Phase
from piecegraph.tools.bench.growth.svg_plot import Line, Plot
from piecegraph.tools.bench.session import bench_arguments, bench_start
from piecegraph.tools.bench.startup.startup import COLD, WARM, Start, start_once
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, flags
from piecegraph.tools.command_line.phases import PhaseDisplay
from piecegraph.tools.command_line.shapes import PREFIX, SHAPES, model_folder

if TYPE_CHECKING:
    from piecegraph.runner.llm import LLM
    from piecegraph.tools.bench.latency import LatencyRow
    from piecegraph.tools.bench.measure.ceilings import Ceilings

_Command = TypeVar("_Command", bound=Callable[..., Any])

STEPS = 64
"""The number of decode steps timed for each point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthPlan:
    """The points at which costs are measured."""

    batch_sizes: tuple[int, ...]  # at the first context
    contexts: tuple[int, ...]  # tokens before the step, at each of the next
    context_batch_sizes: tuple[int, ...]
    depths: tuple[int, ...]  # layers; each a cold start of its own
    capture_counts: tuple[int, ...]  # capture sizes, spread over the ladder; each a warm start of its own

    @property
    def longest(self) -> int:
        return max(self.contexts) + STEPS + 64


def step_plots(llm: LLM, plan: GrowthPlan, ceilings: Ceilings) -> Iterator[Plot]:
    """Return plots of milliseconds per decode step, by batch and by context."""
    from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
    from piecegraph.tools.bench.latency import measure_latency

    full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    context = plan.contexts[0]
    rows = measure_latency(llm, plan.batch_sizes, [full, piecewise], context=context, steps=STEPS, ceilings=ceilings)
    by_mode = {mode: [row for row in rows if row.asked == mode.value] for mode in (full, piecewise)}
    yield Plot(
        name="batch",
        title=f"A decode step by batch, {context} tokens of context each",
        x="requests",
        y="ms",
        lines=(
            Line("FULL", points(by_mode[full], lambda row: row.ms)),
            Line("floor", points(by_mode[full], lambda row: row.floor_ms), is_reference=True),
            Line("PIECEWISE", points(by_mode[piecewise], lambda row: row.ms)),
        ),
    )
    by_context: dict[int, list[LatencyRow]] = {}
    for context in plan.contexts:
        by_context[context] = measure_latency(
            llm, plan.context_batch_sizes, [full], context=context, steps=STEPS, ceilings=ceilings
        )
    lines = []
    for number, batch_size in enumerate(plan.context_batch_sizes):
        for name, ms in ((f"batch {batch_size}", "ms"), (f"floor, batch {batch_size}", "floor_ms")):
            found = tuple((float(context), float(getattr(rows[number], ms))) for context, rows in by_context.items())
            lines.append(Line(name, found, is_reference=ms == "floor_ms"))
    yield Plot(
        name="context", title="A decode step by context, FULL", x="tokens of context", y="ms", lines=tuple(lines)
    )


def points(rows: Sequence[LatencyRow], value: Callable[[LatencyRow], float]) -> tuple[tuple[float, float], ...]:
    return tuple((float(row.batch_size), value(row)) for row in rows)


def depth_plot(starts: Mapping[int, Start]) -> Plot:
    """Return a plot of the seconds of each phase of a cold start, by number of layers."""
    names = ("trace", "compile", "capture", "load")
    return Plot(
        name="depth",
        title="A cold start by depth",
        x="layers",
        y="s",
        is_log=False,
        lines=tuple(
            Line(name, tuple((float(layers), start.spans.get(name, 0.0)) for layers, start in starts.items()))
            for name in names
            if any(name in start.spans for start in starts.values())
        ),
    )


def capture_plots(starts: Sequence[Start]) -> Iterator[Plot]:
    """Return plots of the seconds and the memory of capture, by number of graphs."""
    ordered = sorted(starts, key=num_graphs)
    seconds = tuple((float(num_graphs(start)), start.spans.get("capture", 0.0)) for start in ordered)
    yield Plot(
        name="captures",
        title="Capture by number of graphs, kernels compiled before",
        x="graphs",
        y="s",
        is_log=False,
        lines=(Line("capture", seconds),),
    )
    taken = tuple((float(num_graphs(start)), start.graphs["device_bytes"] / 2**20) for start in ordered)
    pools = tuple((float(num_graphs(start)), pool_bytes(start) / 2**20) for start in ordered)
    yield Plot(
        name="graph_memory",
        title="Memory of graphs by their number",
        x="graphs",
        y="MiB",
        is_log=False,
        lines=(Line("all that capture took", taken), Line("of that the pool", pools)),
    )


def num_graphs(start: Start) -> int:
    """Return the number of buckets captured, over both modes."""
    return sum(mode["graphs"] for mode in _modes(start))


def pool_bytes(start: Start) -> float:
    return sum(float(mode["bytes"]) for mode in _modes(start))


def _modes(start: Start) -> list[Mapping[str, Any]]:
    return [mode for name, mode in start.graphs.items() if name != "device_bytes"]


def spread_sizes(ladder: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` sizes of `ladder`, spread evenly from the first to the last.

    A count of 1 gives the last size alone; a count of at least `len(ladder)` gives all sizes.
    """
    if count >= len(ladder):
        return tuple(ladder)
    if count == 1:
        return (ladder[-1],)
    return tuple(ladder[round(i * (len(ladder) - 1) / (count - 1))] for i in range(count))


def measure_starts(
    shape: str, arguments: Mapping[str, Any], plan: GrowthPlan, scratch: Path, on_phase: Callable[[Phase], None]
) -> tuple[dict[int, Start], list[Start]]:
    """Measure a cold start for each depth, then a warm start for each number of capture sizes.

    The warm starts use the cache that the last cold start filled.
    """
    from piecegraph.runner.common.config_on_device import batched_tokens
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.common.model_source import ModelSource
    from piecegraph.runner.cudagraphs.capture_sizes import default_capture_sizes
    from piecegraph.runner.models.config.device import resolve_device

    started = {"compiler": "inductor", **arguments, "skip_tokenizer_init": True, "max_model_len": plan.longest}
    total = len(plan.depths) + len(plan.capture_counts)
    by_depth: dict[int, Start] = {}
    folder, caches = "", scratch
    for layers in plan.depths:
        on_phase(Phase(name="start", done=len(by_depth) + 1, total=total, detail=f"{layers} layers, cold"))
        folder, caches = model_folder(f"{shape}:{layers}", scratch), scratch / f"caches-{layers}"
        by_depth[layers] = start_once(folder, started, COLD, caches)
    config = EngineConfig(
        source=ModelSource(model=folder), max_num_batched_tokens=arguments.get("max_num_batched_tokens")
    )
    ladder = arguments.get("cudagraph_capture_sizes") or default_capture_sizes(
        batched_tokens(config, resolve_device(arguments.get("device")).type)
    )
    by_count: list[Start] = []
    for count in plan.capture_counts:
        done = len(by_depth) + len(by_count) + 1
        on_phase(Phase(name="start", done=done, total=total, detail=f"{count} capture sizes, warm"))
        sizes = spread_sizes(ladder, count)
        by_count.append(start_once(folder, {**started, "cudagraph_capture_sizes": sizes}, WARM, caches))
    return by_depth, by_count


def numbers_option(flag: str, name: str, default: tuple[int, ...], text: str) -> Callable[[_Command], _Command]:
    """Return a click option that takes one number or several."""
    kind = click.IntRange(min=1)
    return click.option(flag, name, type=kind, multiple=True, default=default, show_default=True, help=text)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("model")
@click.option("--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), required=True, help="JSON file.")
@numbers_option("--batch-size", "batch_sizes", (1, 2, 4, 8, 16, 32, 64, 128, 256), "Requests that decode together.")
@numbers_option("--context", "contexts", (512, 1024, 2048, 4096, 8192), "Tokens before a step; batches at the first.")
@numbers_option("--context-batch-size", "context_batch_sizes", (1, 32), "Requests for which contexts are tried.")
@numbers_option("--depth", "depths", (4, 8, 16, 28), "Layers; each is a cold start.")
@numbers_option("--capture-count", "capture_counts", (1, 4, 16, 35), "Capture sizes; each is a warm start.")
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
def main(model: str, out: Path, **values: Any) -> None:
    """Measure how the cost of MODEL, a shape:NAME, grows, into one JSON file.

    --compile-sizes is 0 unless it is given: what static sizes cost is the same at every depth.
    """
    if not model.startswith(PREFIX) or model.removeprefix(PREFIX) not in SHAPES:
        raise UsageError(
            f"{model!r} is not a shape whose depth can be changed; take one of {[PREFIX + s for s in SHAPES]}."
        )
    plan = GrowthPlan(**{name: tuple(values.pop(name)) for name in GrowthPlan.__dataclass_fields__})
    arguments = with_compile_flags({"compile_sizes": (), **bench_arguments(model, values)}, values)
    with scratch_folder() as scratch:
        with PhaseDisplay(quiet=False) as display:
            by_depth, by_count = measure_starts(model, arguments, plan, scratch, display)
        with bench_start(model, quiet=False, debug=False) as begun:
            from piecegraph.runner.llm import LLM
            from piecegraph.tools.bench.measure.ceilings import measure_ceilings
            from piecegraph.tools.bench.measure.machine import machine_facts

            in_process = {"max_num_seqs": max(plan.batch_sizes), **arguments, "max_model_len": plan.longest}
            with LLM(begun.folder, skip_tokenizer_init=True, on_phase=begun.on_phase, **in_process) as llm:
                layer = next(iter(llm.runner.step.kv_caches.values()))
                ceilings = measure_ceilings(llm.runner.step.buffers.input_ids.device, layer.key.dtype)
                plots = [*step_plots(llm, plan, ceilings), depth_plot(by_depth), *capture_plots(by_count)]
    record = {
        "model": model,
        "plots": [asdict(plot) for plot in plots],
        "ceilings": asdict(ceilings),
        "starts": [asdict(start) for start in (*by_depth.values(), *by_count)],
        "environment": machine_facts(),
    }
    out.write_text(json.dumps(record, default=str), encoding="utf-8")
    click.echo(f"{len(plots)} plots in {out}", err=True)


if __name__ == "__main__":
    main()
