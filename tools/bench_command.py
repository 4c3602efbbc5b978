"""`piecegraph bench`: figures anyone can repeat, with the environment they were taken in."""

from __future__ import annotations

import click

from piecegraph.tools.compare_command import compare
from piecegraph.tools.latency_command import latency
from piecegraph.tools.options import CONTEXT
from piecegraph.tools.passes_command import passes
from piecegraph.tools.startup_command import startup
from piecegraph.tools.throughput_command import throughput


@click.group(context_settings=CONTEXT)
def command() -> None:
    """Measure: milliseconds per decode step, next to the roofline.

    Or tokens a second of an offline workload, next to its floor; where the time of a start goes; what each pass
    saves; other programs beside ours. Each subcommand prints a table, or with --json one object.
    """


for _each in (latency, throughput, startup, passes, compare):
    command.add_command(_each)
