"""`piecegraph cache quarantine ls|clear`."""

from __future__ import annotations

import click

from piecegraph.cache.quarantine import clear_quarantine, quarantined
from piecegraph.tools.cache.confirm import confirmed, yes_option
from piecegraph.tools.cache.key_prefix import SHOWN
from piecegraph.tools.cache.output import emit, table
from piecegraph.tools.cache.place import Place, cache_options
from piecegraph.tools.cache.quantities import ago_text, bytes_text
from piecegraph.tools.options import CONTEXT, Command
from piecegraph.tools.records import as_plain


@click.group(context_settings=CONTEXT)
def command() -> None:
    """Files that were found bad and moved away.

    They are never read again by piecegraph; what they held is compiled again.
    """


@command.command("ls", cls=Command, context_settings=CONTEXT)
@cache_options
def ls(place: Place, as_json: bool) -> None:
    """What lies there, oldest first."""
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
    """Remove all that lies there."""
    store = place.open_to_change()
    found = quarantined(store.layout)
    if found and not yes and not confirmed(f"Remove {len(found)} files in quarantine at {place.root}?"):
        return 1
    removed = clear_quarantine(store.layout)
    emit({"removed": removed}, [f"removed {removed} files"], as_json=as_json)
    return 0
