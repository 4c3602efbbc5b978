"""The command group `piecegraph cache`: its subcommands, each of which is one file of `tools/cache/`."""

from __future__ import annotations

from piecegraph.tools.command_line.lazy_group import LazyGroup
from piecegraph.tools.command_line.options import CONTEXT

SUBCOMMANDS = {
    "ls": ("piecegraph.tools.cache.reading.ls", "List entries: model, pieces, size, last use, hits, state."),
    "show": (
        "piecegraph.tools.cache.reading.show",
        "Show all that is known of an entry; its code, or all of it as files.",
    ),
    "why": ("piecegraph.tools.cache.reading.why", "Explain why there was a hit, or none: the factors that differ."),
    "diff": (
        "piecegraph.tools.cache.reading.diff",
        "Show what differs between two entries: factors, graphs, generated code.",
    ),
    "verify": ("piecegraph.tools.cache.changing.verify", "Check signatures and digests; nothing is run."),
    "du": ("piecegraph.tools.cache.reading.du", "Show disk usage."),
    "stats": ("piecegraph.tools.cache.reading.stats", "Show the hit rate, misses by reason, and seconds saved."),
    "sizes": (
        "piecegraph.tools.cache.reading.sizes",
        "Show the batch shapes of engines, and what other sizes of graphs would save.",
    ),
    "gc": ("piecegraph.tools.cache.changing.gc", "Remove what was longest unused."),
    "rm": ("piecegraph.tools.cache.changing.rm", "Remove entries."),
    "clear": ("piecegraph.tools.cache.changing.clear", "Remove everything."),
    "export": ("piecegraph.tools.cache.changing.export_archive", "Write entries to one signed file."),
    "import": (
        "piecegraph.tools.cache.changing.import_archive",
        "Take entries from an exported file, after all of it was checked.",
    ),
    "keygen": ("piecegraph.tools.cache.changing.keygen", "Make keys to sign with for others."),
    "path": ("piecegraph.tools.cache.reading.path", "Print where the cache is, and which setting says so."),
    "quarantine": (
        "piecegraph.tools.cache.changing.quarantine",
        "List or remove files that were found bad and moved away.",
    ),
}
"""Name -> the module whose `command` it is, and its line in `piecegraph cache --help`."""

command = LazyGroup(
    "cache",
    modules=SUBCOMMANDS,
    help="""List, explain, verify and carry the cache of compiled models.

    An entry is named by its key; the first digits are enough where they name one. With --json each
    subcommand prints one JSON value (docs/cache.md has the shapes). A missing or empty cache is not an error.
    Nothing that is stored is run, and no torch is imported, unless a subcommand says so.
    """,
    context_settings=CONTEXT,
)
