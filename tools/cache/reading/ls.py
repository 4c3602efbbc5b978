"""The command `piecegraph cache ls`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from piecegraph.tools.cache.entries.entry_view import PARTS
from piecegraph.tools.cache.entries.key_prefix import SHOWN
from piecegraph.tools.cache.entries.listing import Listing, Row, read_listing
from piecegraph.tools.cache.terminal.output import emit_json, emit_lines, table
from piecegraph.tools.cache.terminal.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import DURATION, ago_text, bytes_text

EPILOG = """\b
Examples:
  piecegraph cache ls --model llama --sort size
  piecegraph cache ls --state corrupt --json
  piecegraph cache ls --pieces --unused-for 30d"""

ORDERS: dict[str, Callable[[Row], Any]] = {
    "last-used": lambda row: -row.listed.last_used,
    "created": lambda row: -(row.created or 0.0),
    "size": lambda row: -row.listed.size,
    "hits": lambda row: -row.hits,
    "seconds": lambda row: -(row.view.compile_seconds if row.view else 0.0),
    "model": lambda row: (row.view and row.view.title) or "",
    "state": lambda row: row.state,
}
"""The sort keys: numbers and times descend, names ascend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters that were given; None filters nothing."""

    model: str | None
    arch: str | None
    torch: str | None
    state: str | None
    unused_for: float | None  # seconds

    def take(self, row: Row, listing: Listing, now: float) -> bool:
        arch, torch = (row.view.arch, row.view.torch) if row.view is not None else (None, None)
        return (
            _contains(" ".join(listing.models(row)), self.model)
            and _contains(arch, self.arch)
            and (self.torch is None or (torch or "").startswith(self.torch))
            and self.state in (None, row.state)
            and (self.unused_for is None or now - row.listed.last_used > self.unused_for)
        )


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.option("--model", help="Those of models whose name contains this.")
@click.option("--arch", help="Those whose architecture contains this.")
@click.option("--torch", help="Those whose torch version begins with this.")
@click.option("--state", help="Those in this state: complete, corrupt, untrusted, ...")
@click.option("--unused-for", type=DURATION, help="Those that were not used for so long (30d, 12h).")
@click.option(
    "--pieces",
    is_flag=True,
    help="Also the pieces and kernels of each listed model, a row each.",
)
@click.option("--sort", type=click.Choice(list(ORDERS)), default="last-used", show_default=True)
@click.option("--reverse", is_flag=True, help="The other way around.")
@cache_options
def command(place: Place, as_json: bool, pieces: bool, sort: str, reverse: bool, **wanted: Any) -> None:
    """List entries: model, pieces, size, last use, hits, state.

    There is a row for each model, with the pieces it is made of, which it may share; and one for each entry that
    belongs to no model. Signatures are checked, blobs are not (`piecegraph cache verify`). STATE shows what keeps an
    entry from being loaded.
    """
    store = place.open()
    listing = read_listing(store)
    say_if_there_is_none(place, len(listing.rows))
    filters = Filters(**wanted)
    now = store.clock()
    taken = [row for row in listing.rows if filters.take(row, listing, now)]
    rows = [row for row in taken if pieces or not _is_part(row, listing)]
    rows.sort(key=ORDERS[sort], reverse=reverse)
    if as_json:
        emit_json([as_record(row, listing) for row in rows])
    else:
        emit_lines(_lines(rows, listing, now))
    if listing.rows and not taken:
        click.echo(f"none of the {len(listing.rows)} entries is like that", err=True)


def as_record(row: Row, listing: Listing) -> dict[str, Any]:
    """Return a flat record for `--json`; values that the entry does not have are null or empty."""
    view = row.view
    return {
        "key": row.key,
        "kind": view.kind if view else None,
        "models": list(listing.models(row)),
        "arch": view.arch if view else None,
        "torch": view.torch if view else None,
        "num_pieces": view.num_pieces if view else None,
        "num_unique_pieces": view.num_unique_pieces if view else None,
        "sizes": list(view.sizes) if view else [],
        "compile_seconds": view.compile_seconds if view else None,
        "bytes": row.listed.size,
        "bytes_with_pieces": listing.size_with_pieces(row),
        "created": row.created,
        "last_used": row.listed.last_used,
        "hits": row.hits,
        "state": row.state,
        "detail": row.detail,
        "is_loadable": row.is_loadable,
    }


HEADER = ("KEY", "MODEL", "ARCH", "TORCH", "PIECES", "SIZES", "BYTES", "LAST USED", "HITS", "STATE")


def _lines(rows: Sequence[Row], listing: Listing, now: float) -> list[str]:
    cells = [_cells(row, listing, now) for row in rows]
    return table(HEADER, cells, right=("PIECES", "BYTES", "HITS")) if rows else []


def _cells(row: Row, listing: Listing, now: float) -> tuple[object, ...]:
    view = row.view
    model = ", ".join(listing.models(row)) or "-"
    if view is None:
        about: tuple[object, ...] = ("-",) * 5
    else:
        pieces = "-" if view.num_pieces is None else f"{view.num_pieces}/{view.num_unique_pieces}"
        is_part = view.kind in PARTS
        about = (
            f"{view.kind} of {model}"
            if is_part and model != "-"
            else view.kind
            if model == "-" and view.kind
            else model,
            view.arch or "-",
            view.torch or "-",
            pieces,
            ",".join(map(str, view.sizes)) or "-",
        )
    size = bytes_text(listing.size_with_pieces(row))
    return (row.key[:SHOWN], *about, size, ago_text(row.listed.last_used, now), row.hits, row.state)


def _is_part(row: Row, listing: Listing) -> bool:
    """Return whether the entry is a good part of an existing plan; a bad one gets a row of its own."""
    return row.key in listing.plans_of and row.is_loadable


def _contains(text: str | None, part: str | None) -> bool:
    return part is None or part.lower() in (text or "").lower()
