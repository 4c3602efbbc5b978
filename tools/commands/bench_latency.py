"""The command `piecegraph bench latency`: milliseconds of one decode step, next to the least it could take."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.session import about, bench_arguments, bench_start, ceilings_line, output_flags
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, batch_sizes, flags

if TYPE_CHECKING:
    from piecegraph.tools.bench.latency import LatencyRow

MODES = ("full", "piecewise", "none")

EPILOG = """\b
Examples:
  piecegraph bench latency shape:qwen3-0.6b --load-format dummy
  piecegraph bench latency ./my-model --batch-size 1 32 --mode full --json"""


@click.command("latency", cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model")
@batch_sizes(1, 8, 32, 128, 256)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES, case_sensitive=False),
    multiple=True,
    default=MODES,
    show_default=True,
    help="How steps run; one or several.",
)
@click.option("--context", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens before the first.")
@click.option(
    "--prefill-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens of one more request's prompt in each step, beside the decodes: a mixed batch.",
)
@click.option("--steps", type=click.IntRange(min=2), default=128, show_default=True, help="Decode steps timed.")
@click.option(
    "--shard-of",
    type=click.IntRange(2, 64),
    help="Time the share of one of this many ranks alone, with random weights and no collectives; for bench scale.",
)
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@output_flags
def latency(
    model: str,
    batch_sizes: tuple[int, ...],
    modes: tuple[str, ...],
    context: int,
    prefill_tokens: int,
    steps: int,
    shard_of: int | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **values: Any,
) -> None:
    """Measure milliseconds per decode step of MODEL, by batch size and mode.

    MODEL is a folder, a .gguf file, a hub id, or shape:NAME for random weights in a published shape (qwen3-0.6b,
    llama-8b). A step is input preparation, model, logits and the draw of a token, timed between CUDA events. The
    roofline reads every weight and every cached key once, at the rates measured in the same run.

    With --data-parallel-size a batch is spread over the engines, which decode at the same time; a row has the times of
    the slowest.
    """
    arguments = bench_arguments(model, values, takes_engines=True)
    num_ranks, num_engines = arguments.get("tensor_parallel_size", 1), arguments.get("data_parallel_size", 1)
    _check_layout(num_ranks, num_engines, shard_of, arguments)
    arguments.setdefault("max_model_len", max(context + steps, prefill_tokens) + 64)
    arguments.setdefault("max_num_seqs", max(*batch_sizes, 1) + (prefill_tokens > 0))
    with bench_start(model, quiet=quiet, debug=debug) as begun:
        from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
        from piecegraph.runner.llm import LLM
        from piecegraph.tools.command_line.records import as_plain

        display, arguments = begun.display, with_compile_flags(arguments, values)
        folder = begun.folder
        if shard_of is not None:
            from piecegraph.tools.bench.scale.command import config_of
            from piecegraph.tools.bench.scale.shard import shard_folder

            folder = str(shard_folder(config_of(folder), shard_of, begun.scratch))
            arguments["load_format"] = "dummy"
        with LLM(folder, skip_tokenizer_init=True, on_phase=begun.on_phase, **arguments) as llm:
            from piecegraph.tools.bench.latency import latency_notes, measure_latency
            from piecegraph.tools.bench.measure.engines import measure_engines

            ceilings = measure_engines(llm)
            display.stop()
            if not as_json:
                click.echo(HEADER)
            rows = measure_latency(
                llm,
                batch_sizes,
                [CUDAGraphMode.parse(mode) for mode in modes],
                context=context,
                steps=steps,
                ceilings=ceilings,
                prefill_tokens=prefill_tokens,
                on_row=lambda row: None if as_json else click.echo(as_line(row)),
            )
            notes = [*llm.notes, *latency_notes(num_ranks, num_engines)]
            if as_json:
                record = {
                    "model": model,
                    "context": context,
                    "steps": steps,
                    "prefill_tokens": prefill_tokens,
                    "shard_of": shard_of,
                    "ceilings": as_plain(ceilings),
                    "rows": [{**as_plain(row), "share_of_roofline": row.share_of_roofline} for row in rows],
                    **about(llm, display),
                    "notes": notes,
                }
                click.echo(json.dumps(record))
                return
            click.echo(ceilings_line(ceilings))
            for note in notes:
                click.echo(f"note: {note}", err=True)


def _check_layout(num_ranks: int, num_engines: int, shard_of: int | None, arguments: dict[str, Any]) -> None:
    """Raise `ConfigError` for layouts whose steps have no latency here."""
    if arguments.get("pipeline_parallel_size", 1) > 1:
        raise ConfigError(
            "bench latency times the steps of one batch, and with pipeline_parallel_size each stage works at another; "
            "use `piecegraph bench throughput`, or leave it out."
        )
    if num_engines > 1 and arguments.get("enable_expert_parallel"):
        raise ConfigError(
            "bench latency runs the steps of each engine by themselves, and engines that share experts agree on each "
            "step; use `piecegraph bench throughput`, or leave data_parallel_size or enable_expert_parallel out."
        )
    if shard_of is not None and num_ranks * num_engines > 1:
        raise ConfigError(
            "--shard-of times one rank's share alone; leave tensor_parallel_size and data_parallel_size out."
        )


HEADER = (
    f"{'batch':>5} {'mode':<10} {'padded':>6} {'ms/step':>8} {'p10':>8} {'p90':>8} {'launches':>8} {'kernels':>7} "
    f"{'floor ms':>8} {'of roofline':>11}"
)


def as_line(row: LatencyRow) -> str:
    """Return a row of the table; a downgrade shows as the mode that ran, with the reason after it."""
    counts = ["-" if count is None else str(count) for count in (row.launches, row.kernels)]
    line = (
        f"{row.batch_size:>5} {row.mode:<10} {row.padded_tokens:>6} {row.ms:>8.3f} {row.ms_p10:>8.3f} "
        f"{row.ms_p90:>8.3f} {counts[0]:>8} {counts[1]:>7} {row.floor_ms:>8.3f} {row.share_of_roofline:>11.0%}"
    )
    return line if row.reason is None else f"{line}  ({row.asked} was asked for: {row.reason})"
