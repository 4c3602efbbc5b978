"""`piecegraph cache`: which subcommands there are. Each is one file of `tools/cache/`."""

from __future__ import annotations

from piecegraph.tools.lazy_group import LazyGroup
from piecegraph.tools.options import CONTEXT

SUBCOMMANDS = {
    "ls": ("piecegraph.tools.cache.ls", "What there is: model, pieces, size, last use, hits, state."),
    "show": ("piecegraph.tools.cache.show", "All that is known of an entry; its code, or all of it as files."),
    "why": ("piecegraph.tools.cache.why", "Why there was a hit, or none: the factors that differ."),
    "diff": ("piecegraph.tools.cache.diff", "What differs between two entries: factors, graphs, generated code."),
    "verify": ("piecegraph.tools.cache.verify", "Check signatures and digests, and nothing is run."),
    "du": ("piecegraph.tools.cache.du", "What takes how much room."),
    "stats": ("piecegraph.tools.cache.stats", "Hit rate, misses by reason, seconds saved."),
    "gc": ("piecegraph.tools.cache.gc", "Remove what was longest unused."),
    "rm": ("piecegraph.tools.cache.rm", "Remove entries."),
    "clear": ("piecegraph.tools.cache.clear", "Remove everything."),
    "export": ("piecegraph.tools.cache.export_archive", "Write entries to one signed file."),
    "import": ("piecegraph.tools.cache.import_archive", "Take entries from such a file, after all of it was checked."),
    "keygen": ("piecegraph.tools.cache.keygen", "Make keys to sign with for others."),
    "path": ("piecegraph.tools.cache.path", "Where the cache is, and which setting says so."),
    "quarantine": ("piecegraph.tools.cache.quarantine", "Files that were found bad and moved away."),
}
"""Name -> the module whose `command` it is, and its line in `piecegraph cache --help`."""

command = LazyGroup(
    "cache",
    modules=SUBCOMMANDS,
    help="""What is kept of compiled models: list, explain, verify, carry.

    An entry is named by its key; the first digits are enough where they name one. With --json each
    subcommand prints one JSON value (docs/cache.md has the shapes). A cache that is missing or empty is no error.
    Nothing that is stored is run, and no torch is imported, unless a subcommand says so.
    """,
    context_settings=CONTEXT,
)
