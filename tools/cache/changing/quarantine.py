"""The commands `piecegraph cache quarantine ls` and `piecegraph cache quarantine clear`."""

from __future__ import annotations

import click

from piecegraph.cache.trust.quarantine import clear_quarantine, quarantined
from piecegraph.tools.cache.entries.key_prefix import SHOWN
from piecegraph.tools.cache.terminal.confirm import confirmed, yes_option
from piecegraph.tools.cache.terminal.output import emit, table
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import ago_text, bytes_text
from piecegraph.tools.command_line.records import as_plain


@click.group(context_settings=CONTEXT)
def command() -> None:
    """List or remove files that were found bad and moved away.

    They are never read again by piecegraph; what they held is compiled again.
    """


@command.command("ls", cls=Command, context_settings=CONTEXT)
@cache_options
def ls(place: Place, as_json: bool) -> None:
    """List the files in quarantine, oldest first."""
    store = place.open()
    found = quarantined(store.layout)
    if not found:
        click.echo(f"nothing is in quarantine at {place.root}", err=True)
    rows = [
        (each.kind, each.of[:SHOWN], bytes_text(each.size), ago_text(each.since, store.clock()), each.name)
        for each in found
    ]
    lines = table(("WHAT", "OF", "SIZE", "CHANGED", "FILE"), rows, right=("SIZE",)) if found else []
    emit(as_plain(found), lines, as_json=as_json)


@command.command("clear", cls=Command, context_settings=CONTEXT)
@yes_option
@cache_options
def clear(place: Place, as_json: bool, yes: bool) -> int:
    """Remove all files in quarantine."""
    store = place.open_to_change()
    found = quarantined(store.layout)
    if found and not yes and not confirmed(f"Remove {len(found)} files in quarantine at {place.root}?"):
        return 1
    removed = clear_quarantine(store.layout)
    emit({"removed": removed}, [f"removed {removed} files"], as_json=as_json)
    return 0
