"""The command `piecegraph env`: what a bug report needs to know about a machine."""

from __future__ import annotations

import json

import click

from piecegraph.tools.bench.measure.machine import machine_facts
from piecegraph.tools.command_line.options import CONTEXT, Command


@click.command(cls=Command, context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def command(as_json: bool, debug: bool) -> None:
    """Show versions, devices, compilers and folders for a bug report.

    It measures rates of the CPU, too, which are of this moment: other programs take their share. Decoding cannot be
    faster than the bytes of a model's weights over the rate at which memory is read.
    """
    facts = machine_facts()
    if "torch_problem" not in facts:
        from piecegraph.tools.bench.measure.cpu_rates import measure_cpu_rates
        from piecegraph.tools.command_line.records import as_plain

        rates = measure_cpu_rates()
        facts["cpu_rates"] = as_plain(rates) if as_json else str(rates)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        click.echo(f"{name.replace('_', ' ') + ':':18}{value if value else 'none'}")
