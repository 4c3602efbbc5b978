"""The command `piecegraph cache path`."""

from __future__ import annotations

import click

from piecegraph.tools.cache.terminal.output import emit
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, Command


@click.command(cls=Command, context_settings=CONTEXT)
@cache_options
def command(place: Place, as_json: bool) -> None:
    """Print where the cache is, and which setting says so.

    The folder goes to stdout, the setting to stderr. The folder need not exist.
    """
    if not as_json:
        click.echo(f"set by {place.set_by}", err=True)
    record = {"path": str(place.root), "set_by": place.set_by, "exists": place.root.is_dir()}
    emit(record, [str(place.root)], as_json=as_json)
