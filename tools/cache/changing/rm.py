"""The command `piecegraph cache rm`."""

from __future__ import annotations

import click

from piecegraph.cache.upkeep.collect import collect
from piecegraph.errors import UsageError
from piecegraph.tools.cache.entries.key_prefix import SHOWN, find_keys
from piecegraph.tools.cache.entries.listing import read_listing
from piecegraph.tools.cache.entries.signers import signed_by as entries_signed_by
from piecegraph.tools.cache.entries.usage import usage
from piecegraph.tools.cache.terminal.confirm import confirmed, yes_option
from piecegraph.tools.cache.terminal.output import emit
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import bytes_text


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--signed-by", metavar="KEY", help="Those that this signing key has signed: its file, or its id.")
@yes_option
@cache_options
def command(place: Place, as_json: bool, keys: tuple[str, ...], signed_by: str | None, yes: bool) -> int:
    """Remove entries.

    These are the entries named, or, where a signing key is no longer to be trusted, all that it signed, also those it
    signed before they were imported.

    A model is removed with its kernels, and with the pieces that no other model is made of. Bytes written in the last
    ten minutes are removed by a later `gc`: another process may be about to need them.
    """
    store = place.open_to_change()
    if bool(keys) == (signed_by is not None):
        raise UsageError("which entries? Name their keys (`piecegraph cache ls` lists them), or give --signed-by.")
    listing = read_listing(store)
    if signed_by is None:
        named = find_keys(keys, store)
        found = listing.with_own_pieces(named)
    else:
        named = found = entries_signed_by([row.listed.file for row in listing.rows], signed_by)
    parts = f" and {len(found) - len(named)} entries of their own pieces and kernels" if len(found) > len(named) else ""
    shown = ", ".join(key[:SHOWN] for key in named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
    if found and not yes and not confirmed(f"Remove {shown}{parts}?"):
        return 1
    before = usage(store.layout)
    removed = [key for key in found if store.delete(key)]
    collect(store.layout, now=store.clock(), max_bytes=None)
    freed = before.total_bytes - usage(store.layout).total_bytes
    emit(
        {"removed": removed, "freed_bytes": freed},
        [f"removed {len(removed)} entries, {bytes_text(freed)}"],
        as_json=as_json,
    )
    return 0
