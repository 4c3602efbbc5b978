"""The command `piecegraph cache stats`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from piecegraph.cache.disk.counters import Totals
from piecegraph.tools.cache.terminal.output import emit, printable
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import seconds_text


@click.command(cls=Command, context_settings=CONTEXT)
@cache_options
def command(place: Place, as_json: bool) -> None:
    """Show the hit rate, misses by reason, and seconds saved.

    Counts begin when the cache was made or cleared, and cover all processes. A hit saves what compiling took when it
    was done.
    """
    totals = place.open().counters.read()
    if totals.hits + sum(totals.misses.values()) == 0:
        click.echo(f"nothing was looked up yet in the cache at {place.root}", err=True)
    if totals.full:
        click.echo("the record of events is full: what came after is not counted. `cache clear` begins anew", err=True)
    emit(as_record(totals), as_lines(totals), as_json=as_json)


def hit_rate(totals: Totals) -> float | None:
    """Return the share of hits among look-ups; None if there were no look-ups."""
    looked_up = totals.hits + sum(totals.misses.values())
    return totals.hits / looked_up if looked_up else None


def as_record(totals: Totals) -> dict[str, Any]:
    return {
        "hits": totals.hits,
        "misses": dict(totals.misses),
        "hit_rate": hit_rate(totals),
        "seconds_saved": totals.seconds_saved,
        "saves": totals.saves,
        "quarantined": totals.quarantined,
        "unreadable_lines": totals.unreadable,
        "is_complete": not totals.full,
    }


def as_lines(totals: Totals) -> Iterator[str]:
    rate = hit_rate(totals)
    num_misses = sum(totals.misses.values())
    yield f"hits         {totals.hits}" + ("" if rate is None else f"  ({rate:.1%} of {totals.hits + num_misses})")
    yield f"misses       {num_misses}"
    for reason, count in sorted(totals.misses.items(), key=lambda item: (-item[1], item[0])):
        yield f"  {count} {printable(reason)}"
    yield f"saved        {seconds_text(totals.seconds_saved)} of compiling"
    yield f"stored       {totals.saves}"
    yield f"quarantined  {totals.quarantined}"
    if totals.unreadable:
        yield f"unreadable   {totals.unreadable} lines of the record"
