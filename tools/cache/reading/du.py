"""The command `piecegraph cache du`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from piecegraph.cache.upkeep.capacity import max_cache_bytes
from piecegraph.tools.cache.entries.listing import Listing, Row, blob_sizes, read_listing
from piecegraph.tools.cache.entries.usage import Usage, usage
from piecegraph.tools.cache.terminal.output import emit, table
from piecegraph.tools.cache.terminal.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import bytes_text
from piecegraph.tools.command_line.records import as_plain


@dataclass(frozen=True, slots=True)
class ModelRoom:
    """The disk space that the entries of one model take."""

    model: str | None
    entries: int
    bytes: int  # of entries and blobs, each once
    own_bytes: int  # of it what no other model's entries need: removing the model frees this


@click.command(cls=Command, context_settings=CONTEXT)
@cache_options
def command(place: Place, as_json: bool) -> None:
    """Show disk usage.

    Usage is shown by folder, and by model: OWN is what removing that model would free; the rest it shares with others.
    """
    store = place.open()
    found = usage(store.layout)
    listing = read_listing(store)
    say_if_there_is_none(place, len(listing.rows))
    models = by_model(listing)
    record = {
        "path": str(place.root),
        "total_bytes": found.total_bytes,
        "max_bytes": max_cache_bytes(),
        **as_plain(found),
        "models": as_plain(models),
    }
    emit(record, _lines(found, models), as_json=as_json)


def by_model(listing: Listing) -> tuple[ModelRoom, ...]:
    """Return the usage of each model, the largest first.

    A piece counts with every model made of it; entries that belong to no model count with None.
    """
    rows_of: dict[str | None, list[Row]] = {}
    for row in listing.rows:
        for model in listing.models(row) or (None,):
            rows_of.setdefault(model, []).append(row)
    rooms = []
    for model, rows in rows_of.items():
        others = [row for other, rows in rows_of.items() if other != model for row in rows]
        other_keys, other_blobs = {row.key for row in others}, blob_sizes(others)
        files = {row.key: row.listed.file.size for row in rows}
        blobs = blob_sizes(rows)
        own = sum(size for key, size in files.items() if key not in other_keys)
        own += sum(size for digest, size in blobs.items() if digest not in other_blobs)
        rooms.append(ModelRoom(model, len(rows), sum(files.values()) + sum(blobs.values()), own))
    return tuple(sorted(rooms, key=lambda room: (-room.bytes, room.model or "")))


def _lines(found: Usage, models: Sequence[ModelRoom]) -> Iterator[str]:
    rooms = {
        "entries": found.entries,
        "blobs": found.blobs,
        "quarantine": found.quarantine,
        "being written": found.temp,
        "other": found.other,
    }
    rows = [(name, room.files, bytes_text(room.bytes)) for name, room in rooms.items()]
    yield from table(("WHAT", "FILES", "SIZE"), rows, right=("FILES", "SIZE"))
    yield f"total {bytes_text(found.total_bytes)}; at most {bytes_text(max_cache_bytes())} are kept"
    if models:
        yield ""
        cells = [
            (room.model or "-", room.entries, bytes_text(room.bytes), bytes_text(room.own_bytes)) for room in models
        ]
        yield from table(("MODEL", "ENTRIES", "SIZE", "OWN"), cells, right=("ENTRIES", "SIZE", "OWN"))
