"""The command `piecegraph cache show`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Miss, Store
from piecegraph.errors import CacheError, UsageError
from piecegraph.tools.cache.entries.contents import Kind, content_files, load
from piecegraph.tools.cache.entries.entry_view import DEEPEST, is_too_deep, view
from piecegraph.tools.cache.entries.factors_text import leaf_lines
from piecegraph.tools.cache.entries.key_prefix import SHOWN, find_key
from piecegraph.tools.cache.entries.listing import Listing, Row, read_listing
from piecegraph.tools.cache.entries.plan_pieces import PlanPiece, plan_pieces
from piecegraph.tools.cache.entries.signers import signers
from piecegraph.tools.cache.reading.dump import dump
from piecegraph.tools.cache.terminal.output import emit, printable, printable_lines, table
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.quantities import ago_text, bytes_text, seconds_text
from piecegraph.tools.command_line.records import as_plain

EPILOG = """\b
Examples:
  piecegraph cache show 3f2a91
  piecegraph cache show 3f2a91 --code | less
  piecegraph cache show 3f2a91 --dump look"""


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("key")
@click.option("--code", "with_code", is_flag=True, help="The stitched module and the generated code of each piece.")
@click.option(
    "--dump",
    "dump_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write all of it to files in this folder, which must be new or empty.",
)
@cache_options
def command(place: Place, as_json: bool, key: str, with_code: bool, dump_dir: Path | None) -> None:
    """Show all that is known of an entry; its code, or all of it as files.

    The output has factors, pieces and the sizes they are for, seconds, digests and passes. --dump writes the stitched
    module, graph, code and kernels of every unique piece, and, where depyf is installed, its view of the bytecode.
    """
    if with_code and dump_dir is not None:
        raise UsageError("--code prints, --dump writes; give one of the two.")
    store = place.open()
    listing = read_listing(store)
    row = listing.by_key[find_key(key, sorted(listing.by_key))]
    if dump_dir is not None:
        files = dump(content_files(store, load(store, row.key)), dump_dir)
        emit(
            {"key": row.key, "dir": str(dump_dir), "files": files},
            (str(dump_dir / name) for name in files),
            as_json=as_json,
        )
        return
    record = as_record(store, row, listing)
    if with_code:
        record["code"] = code_of(store, row.key)
    emit(record, _code_lines(record["code"]) if with_code else _lines(record, store.clock()), as_json=as_json)


def as_record(store: Store, row: Row, listing: Listing) -> dict[str, Any]:
    """Return everything for `--json`. Raises `CacheError` for a file that cannot be read as an entry."""
    entry = row.listed.file.entry
    if entry is None or row.view is None:
        raise CacheError(f"entry {row.key[:SHOWN]} cannot be made out: it is {row.state} ({row.detail}).")
    if is_too_deep(entry):
        raise CacheError(
            f"entry {row.key[:SHOWN]} cannot be shown: its values are nested deeper than {DEEPEST} levels, so it is "
            f"none of ours. Run: piecegraph cache rm {row.key[:SHOWN]}"
        )
    return {
        "key": row.key,
        "state": row.state,
        "detail": row.detail,
        "is_loadable": row.is_loadable,
        "kind": row.view.kind,
        "models": list(listing.models(row)),
        "arch": row.view.arch,
        "created": row.created,
        "last_used": row.listed.last_used,
        "hits": row.hits,
        "bytes": row.listed.size,
        "bytes_with_pieces": listing.size_with_pieces(row),
        "signed_by": as_plain(signers(row.listed.file, store.keyring)),
        "format": entry.format,
        "versions": dict(entry.versions),
        "seconds": dict(entry.seconds),
        "passes": dict(row.view.passes),
        "pieces": [_piece_record(piece, listing) for piece in _pieces(store, entry)],
        "functions": dict(row.view.functions),
        "plans": [plan.key for plan in listing.plans_of.get(row.key, ())],
        "blobs": {role: {"digest": ref.digest, "size": ref.size} for role, ref in sorted(entry.blobs.items())},
        "notes": dict(entry.notes),
        "factors": dict(entry.factors),
    }


def _pieces(store: Store, entry: Entry) -> Sequence[PlanPiece]:
    found = store.verify(entry.key)
    if isinstance(found, Miss):  # what its notes say must do
        return tuple(PlanPiece(key, None, None, 0, ()) for key in view(entry).pieces)
    return plan_pieces(found)


def _piece_record(piece: PlanPiece, listing: Listing) -> dict[str, Any]:
    row = listing.by_key.get(piece.key)
    shown = row.view if row is not None else None
    return {
        "key": piece.key,
        "unique": piece.unique,
        "shared_by": piece.shared_by,
        "size": piece.size,
        "takes": list(piece.takes),
        "nodes": shown.nodes if shown else None,
        "kernels": shown.kernels if shown else None,
        "compile_seconds": shown.compile_seconds if shown else None,
        "state": row.state if row is not None else "absent",
    }


def code_of(store: Store, key: str) -> dict[str, str]:
    """Return generated code by path. Raises `CacheError` if there is none, or the entry cannot be loaded."""
    files = content_files(store, load(store, key))
    code = {file.path: file.text or "" for file in files if file.kind is Kind.CODE}
    if not code:
        raise CacheError(f"entry {key[:SHOWN]} holds no generated code; `--dump DIR` writes what it holds.")
    return code


def _code_lines(code: dict[str, str]) -> Iterator[str]:
    for path, text in code.items():
        yield f"# ---- {path} ----"
        yield printable_lines(text)


def _lines(record: dict[str, Any], now: float) -> Iterator[str]:
    yield _titled("key", record["key"])
    yield _titled("state", ": ".join(filter(None, (record["state"], record["detail"]))))
    yield _titled("kind", record["kind"] or "-")
    yield _titled("model", ", ".join(record["models"]) or "-")
    yield _titled("arch", record["arch"] or "-")
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["created"]))
    yield _titled("made", f"{made} ({ago_text(record['created'], now)})")
    yield _titled("last used", f"{ago_text(record['last_used'], now)}, {record['hits']} hits")
    size, whole = record["bytes"], record["bytes_with_pieces"]
    yield _titled("size", bytes_text(size) + (f"; {bytes_text(whole)} with its pieces" if whole > size else ""))
    for each in record["signed_by"]:
        yield _titled("signed by", _signer_text(each))
    yield _titled("versions", ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items())))
    yield _titled("seconds", ", ".join(f"{name} {seconds_text(each)}" for name, each in record["seconds"].items()))
    if record["passes"]:
        yield _titled("passes", ", ".join(f"{name} {count}" for name, count in record["passes"].items()))
    if record["functions"]:
        yield _titled("kernels", ", ".join(f"{name} {count}" for name, count in record["functions"].items()))
    if record["plans"]:
        yield _titled("part of", ", ".join(key[:SHOWN] for key in record["plans"]))
    if record["pieces"]:
        yield ""
        yield from table(PIECES, map(_piece_cells, record["pieces"]), right=PIECES[1:3] + PIECES[4:7])
    yield ""
    blobs = [(role, bytes_text(ref["size"]), ref["digest"]) for role, ref in record["blobs"].items()]
    yield from table(("BLOB", "SIZE", "SHA256"), blobs, right=("SIZE",))
    yield ""
    yield "FACTORS"
    yield from leaf_lines(record["factors"])


PIECES = ("PIECE", "UNIQUE", "SHARED BY", "FOR", "NODES", "KERNELS", "SECONDS", "STATE")


def _signer_text(signed: dict[str, Any]) -> str:
    whose = {"own": "your own key", "configured": "a configured key", "not held": "a key that you do not hold"}
    is_good = {True: "", False: ", and the signature does not fit", None: ", so it cannot be verified"}
    when = "before it was imported, " if signed["is_original"] else ""
    return f"{signed['key_id']} ({signed['scheme']}): {when}{whose[signed['whose']]}{is_good[signed['is_good']]}"


def _piece_cells(piece: dict[str, Any]) -> tuple[object, ...]:
    takes = ", ".join(piece["takes"])
    seconds = piece["compile_seconds"]
    return (
        piece["key"][:SHOWN],
        _or_dash(piece["unique"]),
        piece["shared_by"] or "-",
        f"{takes} = {piece['size']}" if piece["size"] is not None else f"any {takes}" if takes else "-",
        _or_dash(piece["nodes"]),
        _or_dash(piece["kernels"]),
        "-" if seconds is None else f"{seconds:.2f}",
        piece["state"],
    )


def _or_dash(value: object) -> object:
    return "-" if value is None else value


def _titled(title: str, text: str) -> str:
    return f"{title:10}{printable(text)}"
