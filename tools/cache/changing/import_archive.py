"""The command `piecegraph cache import`."""

from __future__ import annotations

from pathlib import Path

import click

from piecegraph.cache.upkeep.archive import import_archive
from piecegraph.tools.cache.terminal.output import emit
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.records import as_plain


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--trust", is_flag=True, help="Take it though no key of yours signed it: its maker's code runs as you.")
@cache_options
def command(place: Place, as_json: bool, file: Path, trust: bool) -> None:
    """Take entries from an exported file, after all of it was checked.

    Signature, manifest and every digest are checked before a byte is written. Imported entries are signed with your
    key, and keep the signatures they had (`piecegraph cache show`).
    """
    done = import_archive(place.open_to_change(), file, trust=trust)
    how = "signed by a key you hold" if done.signed else "on trust"
    emit({"file": str(file), **as_plain(done)}, [f"took {len(done.keys)} entries, {how}"], as_json=as_json)
