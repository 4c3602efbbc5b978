"""The plan and the pieces of a model that are in a cache now, for the output of `piecegraph compile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.cache.store.entry import BlobRef, Entry
from piecegraph.cache.store.store import Miss, Store
from piecegraph.errors import CacheError
from piecegraph.tools.cache.entries.key_prefix import SHOWN
from piecegraph.tools.cache.entries.plan_pieces import plan_pieces
from piecegraph.tools.cache.terminal.output import printable, table
from piecegraph.tools.command_line.quantities import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledRow:
    """An entry."""

    name: str  # "plan", "piece_1", "piece_1_size_8"
    size: int | None  # the static one
    shared_by: int | None  # pieces of the model it runs; None: it is the plan
    seconds: float  # to compile it, when that was done
    bytes: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A plan and its pieces, all bytes of which were found good."""

    title: str  # class of the model, number of parameters, dtype
    rows: tuple[FilledRow, ...]  # the plan first
    bytes: int  # all together; what several share counts once
    factors: Mapping[str, Any]  # of the plan


def read_filled(store: Store, key: str) -> Filled:
    """Read the plan under `key` and all it is made of. Raises `CacheError` if one of them cannot be loaded."""
    plan = store.verify(key)
    if isinstance(plan, Miss):
        raise _not_there(store, "plan", plan)
    rows = [_row("plan", None, None, plan.entry)]
    blobs: set[BlobRef] = set(plan.entry.blobs.values())
    for piece in plan_pieces(plan):
        found = store.verify(piece.key)
        if isinstance(found, Miss):
            raise _not_there(store, piece.name, found)
        rows.append(_row(piece.name, piece.size, piece.shared_by, found.entry))
        blobs |= set(found.entry.blobs.values())
    notes = plan.entry.notes
    return Filled(
        title=f"{notes['model']} {notes['num_parameters'] / 1e6:.1f}M {notes['dtype']}",
        rows=tuple(rows),
        bytes=sum(ref.size for ref in blobs),
        factors=plan.entry.factors,
    )


def _row(name: str, size: int | None, shared_by: int | None, entry: Entry) -> FilledRow:
    return FilledRow(
        name=name,
        size=size,
        shared_by=shared_by,
        seconds=sum(entry.seconds.values()),
        bytes=entry.blob_bytes,
        key=entry.key,
    )


def _not_there(store: Store, what: str, miss: Miss) -> CacheError:
    why = ": ".join(filter(None, (miss.reason.value, miss.detail)))
    return CacheError(
        f"{what} was stored in {store.layout.root} and cannot be read again ({why}). Run this again; if that does not "
        "help, look at it with `piecegraph cache verify`."
    )


def table_lines(rows: Sequence[FilledRow]) -> list[str]:
    """Return one line per row; the size `any` is that of a dynamic piece."""
    cells = [
        (
            row.name,
            "" if row.shared_by is None else "any" if row.size is None else row.size,
            "" if row.shared_by is None else row.shared_by,
            f"{row.seconds:.1f}",
            bytes_text(row.bytes),
            row.key[:SHOWN],
        )
        for row in rows
    ]
    header = ("entry", "size", "pieces", "seconds", "bytes", "key")
    return table(header, cells, right=("size", "pieces", "seconds", "bytes"))


def target_lines(factors: Mapping[str, Any]) -> Iterator[str]:
    """Return the machine, the versions and the process settings that the plan was compiled for.

    A start finds the plan where these are the same.
    """
    machine, build, settings = factors["machine"], factors["build"], factors["settings"]
    cpu, gpu = machine["cpu"], machine.get("gpu")
    if gpu is not None:
        yield printable(
            f"cuda:{gpu['index']}, {gpu['name']} (compute capability {gpu['capability']}), driver {gpu['driver']}, "
            f"CUDA {gpu['cuda']}; host code for {cpu['machine']} {cpu['isa']}"
        )
    else:
        yield printable(f"{machine['device']}, {cpu['machine']} {cpu['isa']} (flags {cpu['flags']})")
    versions = ", ".join(
        printable(text)
        for text in (
            f"torch {build['torch']['version']}",
            f"triton {build['triton']}",
            f"transformers {build['transformers']}",
            build["python"],
        )
    )
    threads = settings["num_threads"]
    yield f"{versions}; {threads} {'thread' if threads == 1 else 'threads'}"
