"""`piecegraph cache import`."""

from __future__ import annotations

from pathlib import Path

import click

from piecegraph.cache.archive import import_archive
from piecegraph.tools.cache.output import emit
from piecegraph.tools.cache.place import Place, cache_options
from piecegraph.tools.options import CONTEXT, Command
from piecegraph.tools.records import as_plain


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--trust", is_flag=True, help="Take it though no key of yours signed it: its maker's code runs as you.")
@cache_options
def command(place: Place, as_json: bool, file: Path, trust: bool) -> None:
    """Take entries from such a file, after all of it was checked.

    Signature, manifest and every digest, before a byte is written. What was taken is signed with your key.
    """
    done = import_archive(place.open_to_change(), file, trust=trust)
    how = "signed by a key you hold" if done.signed else "on trust"
    emit({"file": str(file), **as_plain(done)}, [f"took {len(done.keys)} entries, {how}"], as_json=as_json)
