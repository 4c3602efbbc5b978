"""The command `piecegraph bench passes`: what each pass saves, and what compiling saves with and without them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from piecegraph.tools.bench.session import bench_arguments, bench_start, output_flags
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, batch_sizes, flags

if TYPE_CHECKING:
    from piecegraph.tools.bench.passes import Measured

EPILOG = """\b
Examples:
  piecegraph bench passes shape:qwen3-0.6b
  piecegraph bench passes ./my-model --batch-size 1 32 --json
  piecegraph bench passes shape:llama-8b --passes merge-projections,fuse-act-mul --no-pieces"""


@click.command("passes", cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model")
@batch_sizes(1, 32)
@click.option("--context", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens before the first.")
@click.option(
    "--steps", type=click.IntRange(min=2), default=128, show_default=True, help="Decode steps timed in a row."
)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Times that is done.")
@click.option("--pieces/--no-pieces", "with_pieces", default=True, help="Time each piece alone too. [default: pieces]")
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@output_flags
def passes(
    model: str,
    batch_sizes: tuple[int, ...],
    context: int,
    steps: int,
    repeat: int,
    with_pieces: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **values: Any,
) -> None:
    """Measure what each pass saves in a decode step of MODEL, by batch size.

    The whole step runs under a FULL graph, timed between CUDA events: with all passes, with each one off in turn, with
    none, and with pieces that are not compiled at all. A pass that saves less than 3 % of the step and less than 1 us
    a layer at every batch size is marked. --passes chooses the passes that count as all.
    """
    arguments = bench_arguments(model, values)
    with bench_start(model, quiet=quiet, debug=debug) as begun:
        from piecegraph.passes.pipeline import default_passes
        from piecegraph.runner.models.config.device import resolve_device
        from piecegraph.tools.bench.measure.machine import machine_facts
        from piecegraph.tools.bench.passes import Plan, measure_passes, variants
        from piecegraph.tools.command_line.records import as_plain

        device_type = resolve_device(arguments.get("device")).type
        arguments = with_compile_flags(arguments, values)
        named = arguments.get("compilation_config", {}).get("passes")
        num_ranks = arguments.get("tensor_parallel_size", 1)
        names = [each.name for each in default_passes(device_type, num_ranks)] if named is None else named
        compiler = "eager" if arguments.pop("enforce_eager", False) else arguments.pop("compiler", "inductor")
        plan = Plan(batch_sizes=batch_sizes, context=context, steps=steps, repeats=repeat, with_pieces=with_pieces)
        measured, ceilings = measure_passes(
            begun.folder, arguments, variants(names, compiler), plan, on_phase=begun.on_phase
        )
        begun.display.stop()
    if as_json:
        record = {
            "model": model,
            "plan": as_plain(plan),
            "ceilings": as_plain(ceilings),
            "variants": as_records(measured),
            "environment": machine_facts(),
        }
        click.echo(json.dumps(record))
        return
    click.echo("\n".join(as_lines(measured)))


def as_records(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return every variant with the time that all passes save over it."""
    from piecegraph.tools.bench.passes import note, pays, saving
    from piecegraph.tools.command_line.records import as_plain

    everything = measured[0]
    return [
        {
            **as_plain(each),
            "savings": [
                {**as_plain(found), "pays": found.pays}
                for found in (saving(each, everything, step.batch_size) for step in each.steps)
            ],
            "pays": pays(each, everything),
            "note": note(each, everything),
            "pieces": [{**as_plain(piece), "us_per_step": piece.us_per_step} for piece in each.pieces],
        }
        for each in measured
    ]


def as_lines(measured: Sequence[Measured]) -> Iterator[str]:
    """Return one table per question: what a step takes, what each pass saves, what compiling saves, piece by piece."""
    from piecegraph.tools.bench.passes import AGAIN, ALL, EAGER, NONE, note, pays, saving

    everything = measured[0]
    by_name = {each.variant.name: each for each in measured}
    width = max(len(each.variant.name) for each in measured)
    yield f"{everything.num_layers} layers; saved: by all passes, over the variant in the line"
    yield (
        f"{'variant':<{width}} {'batch':>5} {'ms/step':>8} {'min':>8} {'max':>8} {'kernels':>7} {'/layer':>6} "
        f"{'saved us/layer':>14} {'saved':>6}"
    )
    for each in measured:
        for step in each.steps:
            found = saving(each, everything, step.batch_size)
            kernels = "-" if step.kernels is None else str(step.kernels)
            per_layer = "-" if step.kernels is None else f"{step.kernels / each.num_layers:.1f}"
            saved = (
                ("", "")
                if each is everything
                else (f"{found.us_a_layer:.2f}{'~' if found.is_noise else ''}", f"{found.percent:.1f}%")
            )
            yield (
                f"{each.variant.name:<{width}} {step.batch_size:>5} {step.ms:>8.3f} {step.ms_min:>8.3f} "
                f"{step.ms_max:>8.3f} {kernels:>7} {per_layer:>6} {saved[0]:>14} {saved[1]:>6}"
            ).rstrip()
        remarks = [note(each, everything)] if note(each, everything) else []
        if pays(each, everything) is False:
            remarks.insert(
                0, f"{each.variant.without} DOES NOT PAY: less than 3 % and 1 us a layer at every batch size"
            )
        yield from (f"  {remark}" for remark in remarks)
    yield "~: the spreads of the two overlap. kernels: of a whole step; /layer: the same, shared out over the layers"
    worth = [by_name[name] for name in (EAGER, NONE, ALL) if name in by_name]
    for step in everything.steps:
        ms = [f"{each.variant.name} {each.at(step.batch_size).ms:.3f} ms" for each in worth]
        factor = worth[0].at(step.batch_size).ms / step.ms
        yield f"compile-worth at batch {step.batch_size}: {' -> '.join(ms)}: {factor:.2f}x"
    if AGAIN in by_name and any(each.pieces for each in worth):
        yield from piece_lines(worth)


def piece_lines(worth: Sequence[Measured]) -> Iterator[str]:
    """Return a table of each unique piece alone.

    Passes move work across cuts: only variants of equal passes have equal pieces.
    """
    yield "each piece alone, microseconds of a call, mean over the pieces that share it (a step: all of them)"
    for each in worth:
        for unique in sorted({piece.unique for piece in each.pieces}):
            mine = [piece for piece in each.pieces if piece.unique == unique]
            pieces = mine[0].pieces
            where = f"piece {pieces[0]}" if len(pieces) == 1 else f"{len(pieces)} pieces {pieces[0]}..{pieces[-1]}"
            times = ", ".join(f"batch {piece.batch_size}: {piece.us:.2f} ({piece.us_per_step:.1f})" for piece in mine)
            yield f"  {each.variant.name:<12} unique {unique}, {where}: {times}"
        totals: dict[int, float] = {}
        for piece in each.pieces:
            totals[piece.batch_size] = totals.get(piece.batch_size, 0.0) + piece.us_per_step
        yield f"  {each.variant.name:<12} all pieces of a step: " + ", ".join(
            f"batch {size}: {us:.1f}" for size, us in totals.items()
        )
