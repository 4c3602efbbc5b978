"""The command `piecegraph cache export`."""

from __future__ import annotations

from pathlib import Path

import click

from piecegraph.cache.upkeep.archive import export_archive
from piecegraph.errors import CacheError, UsageError
from piecegraph.tools.cache.entries.key_prefix import find_keys, keys_of
from piecegraph.tools.cache.entries.listing import read_listing
from piecegraph.tools.cache.terminal.output import emit
from piecegraph.tools.cache.terminal.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import bytes_text

EPILOG = """\b
Examples:
  piecegraph cache export smollm2.pgcache 3f2a91
  piecegraph cache export everything.pgcache --all"""


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("keys", metavar="KEY...", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="Every entry.")
@cache_options
def command(place: Place, as_json: bool, file: Path, keys: tuple[str, ...], is_all: bool) -> None:
    """Write entries to one signed file.

    The file also holds the pieces and kernels that the entries are made of. Whoever imports it needs the key it is
    signed with, or must trust it. Nothing is written for an empty cache.
    """
    if bool(keys) == is_all:
        raise UsageError("which entries? Name their keys (`piecegraph cache ls` lists them), or give --all, not both.")
    store = place.open()
    chosen = keys_of(store) if is_all else read_listing(store).with_pieces(find_keys(keys, store))
    say_if_there_is_none(place, len(chosen))
    try:
        size = export_archive(store, file, chosen) if chosen else 0
    except OSError as error:
        raise CacheError(f"{file} cannot be written: {error}") from error
    emit(
        {"file": str(file), "keys": chosen, "bytes": size},
        [f"wrote {len(chosen)} entries, {bytes_text(size)}, to {file}"],
        as_json=as_json,
    )
