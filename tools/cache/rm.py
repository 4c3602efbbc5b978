"""`piecegraph cache rm`."""

from __future__ import annotations

import click

from piecegraph.cache.collect import collect
from piecegraph.tools.cache.confirm import confirmed, yes_option
from piecegraph.tools.cache.key_prefix import SHOWN, find_keys
from piecegraph.tools.cache.listing import read_listing
from piecegraph.tools.cache.output import emit
from piecegraph.tools.cache.place import Place, cache_options
from piecegraph.tools.cache.quantities import bytes_text
from piecegraph.tools.cache.usage import usage
from piecegraph.tools.options import CONTEXT, Command


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@yes_option
@cache_options
def command(place: Place, as_json: bool, keys: tuple[str, ...], yes: bool) -> int:
    """Remove entries.

    With a model go its kernels, and the pieces that no other model is made of. Bytes written in the last ten minutes
    go with a later `gc`: another process may be about to need them.
    """
    store = place.open_to_change()
    named = find_keys(keys, store)
    found = read_listing(store).with_own_pieces(named)
    parts = f" and {len(found) - len(named)} entries of their own pieces and kernels" if len(found) > len(named) else ""
    if not yes and not confirmed(f"Remove {', '.join(key[:SHOWN] for key in named)}{parts}?"):
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
