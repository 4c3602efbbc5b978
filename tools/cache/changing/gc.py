"""The command `piecegraph cache gc`."""

from __future__ import annotations

import click

from piecegraph.cache.upkeep.capacity import max_cache_bytes
from piecegraph.cache.upkeep.collect import Collected, collect
from piecegraph.tools.cache.terminal.output import emit
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import BYTES, DURATION, bytes_text
from piecegraph.tools.command_line.records import as_plain

EPILOG = """\b
Examples:
  piecegraph cache gc --max-size 2GiB
  piecegraph cache gc --older-than 30d --dry-run"""


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.option(
    "--max-size",
    type=BYTES,
    show_default="PIECEGRAPH_CACHE_MAX_SIZE, or 10GiB",
    help="The most that may stay; entries that were longest unused are removed first.",
)
@click.option("--older-than", type=DURATION, help="Also remove what was not used for so long (30d, 12h).")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@cache_options
def command(place: Place, as_json: bool, max_size: int | None, older_than: float | None, dry_run: bool) -> None:
    """Remove what was longest unused.

    This also removes what killed processes left behind. It is safe beside processes that read and write the cache. A
    process that has compiled something does the same if the cache is larger than its limit.
    """
    store = place.open() if dry_run else place.open_to_change()
    max_size = max_cache_bytes() if max_size is None else max_size
    done = collect(store.layout, now=store.clock(), max_bytes=max_size, older_than_s=older_than, dry_run=dry_run)
    emit({**as_plain(done), "dry_run": dry_run}, [as_line(done, dry_run=dry_run)], as_json=as_json)


def as_line(done: Collected, *, dry_run: bool) -> str:
    what = f"{len(done.entries)} entries, {len(done.blobs)} blobs, {done.temp_files} files of killed writers"
    return (
        f"{'would remove' if dry_run else 'removed'} {what}: {bytes_text(done.freed_bytes)}; "
        f"{bytes_text(done.kept_bytes)} {'would stay' if dry_run else 'stay'}"
    )
