"""The command `piecegraph cache keygen`."""

from __future__ import annotations

from pathlib import Path

import click

from piecegraph.cache.trust.key_files import create_key_pair
from piecegraph.errors import CacheError
from piecegraph.tools.cache.terminal.output import emit
from piecegraph.tools.command_line.options import CONTEXT, Command

EPILOG = """\b
Example:
  piecegraph cache keygen image.key
  piecegraph cache export model.pgcache --all --signing-key image.key
  piecegraph cache import model.pgcache --signing-key image.key.pub"""


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def command(file: Path, as_json: bool, debug: bool) -> None:
    """Make keys to sign with for others.

    FILE signs and is for its owner alone. FILE.pub is for readers: it verifies, and cannot sign. No existing file is
    overwritten.
    """
    try:
        public = create_key_pair(file)
    except OSError as error:
        raise CacheError(f"{file} cannot be written: {error}.") from error
    emit(
        {"private": str(file), "public": str(public)},
        [f"{file} signs: keep it to yourself", f"{public} verifies: give it to readers"],
        as_json=as_json,
    )
