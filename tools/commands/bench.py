"""The command group `piecegraph bench`: figures anyone can repeat, with the environment they were taken in."""

from __future__ import annotations

import click

from piecegraph.tools.bench.perplexity import command as perplexity
from piecegraph.tools.bench.scale.command import command as scale
from piecegraph.tools.command_line.options import CONTEXT
from piecegraph.tools.commands.bench_compare import compare
from piecegraph.tools.commands.bench_latency import latency
from piecegraph.tools.commands.bench_passes import passes
from piecegraph.tools.commands.bench_speculative import speculative
from piecegraph.tools.commands.bench_startup import startup
from piecegraph.tools.commands.bench_throughput import throughput


@click.group(context_settings=CONTEXT)
def command() -> None:
    """Measure decode steps, workloads, starts, passes, drafts and other programs.

    Figures are milliseconds per decode step, next to the roofline; tokens a second of an offline workload, next to its
    floor; where the time of a start goes; what each pass saves; other programs beside ours; how well a model predicts a
    text; what many GPUs would do, simulated. Each subcommand prints a table, or with --json one object.
    """


for _each in (latency, throughput, startup, passes, compare, speculative, perplexity, scale):
    command.add_command(_each)
