"""The command `piecegraph cache clear`."""

from __future__ import annotations

import click

from piecegraph.cache.upkeep.collect import collect
from piecegraph.tools.cache.entries.key_prefix import keys_of
from piecegraph.tools.cache.entries.usage import usage
from piecegraph.tools.cache.terminal.confirm import confirmed, yes_option
from piecegraph.tools.cache.terminal.output import emit
from piecegraph.tools.cache.terminal.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import bytes_text


@click.command(cls=Command, context_settings=CONTEXT)
@yes_option
@cache_options
def command(place: Place, as_json: bool, yes: bool) -> int:
    """Remove everything.

    This removes all entries, the data they share, and the statistics. Quarantine stays: `piecegraph cache quarantine
    clear`. A process that is compiling may find its work gone, and compiles it again next time.
    """
    store = place.open_to_change()
    keys = keys_of(store)
    say_if_there_is_none(place, len(keys))
    if keys and not yes and not confirmed(f"Remove all {len(keys)} entries of {place.root}?"):
        return 1
    before = usage(store.layout)
    removed = [key for key in keys if store.delete(key)]
    collect(store.layout, now=store.clock(), max_bytes=None, fresh_s=0)
    store.counters.clear()
    freed = before.total_bytes - usage(store.layout).total_bytes
    emit(
        {"removed": removed, "freed_bytes": freed},
        [f"removed {len(removed)} entries, {bytes_text(freed)}"],
        as_json=as_json,
    )
    return 0
