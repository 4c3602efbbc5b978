"""The command `piecegraph cache verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from piecegraph.cache.store.entry_file import MissReason
from piecegraph.cache.store.store import Miss, Store
from piecegraph.errors import CacheError, UntrustedCache, UsageError
from piecegraph.tools.cache.entries.entry_view import PIECE, view
from piecegraph.tools.cache.entries.key_prefix import SHOWN, find_keys, keys_of
from piecegraph.tools.cache.entries.listing import MISSING_PIECES, Row, read_listing
from piecegraph.tools.cache.terminal.output import emit, table
from piecegraph.tools.cache.terminal.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.records import as_plain

if TYPE_CHECKING:
    from piecegraph.tools.cache.entries.proof import Prover

CORRUPT, UNTRUSTED, NOT_VERIFIED = 1, 2, 4

EPILOG = """\b
Exit code: the sum of 1 (something is corrupt), 2 (something is untrusted) and
4 (something could not be verified); 0 where all is well."""

BITS = {
    MissReason.CORRUPT: CORRUPT,
    MissReason.BLOB_CORRUPT: CORRUPT,
    MissReason.BLOB_MISSING: CORRUPT,
    MissReason.FORGED: UNTRUSTED,
    MissReason.UNTRUSTED: UNTRUSTED,
    MissReason.OTHER_VERSION: NOT_VERIFIED,
    MissReason.UNREADABLE: NOT_VERIFIED,
    MissReason.ABSENT: NOT_VERIFIED,
}
RESULTS = {0: "ok", CORRUPT: "corrupt", UNTRUSTED: "untrusted", NOT_VERIFIED: "not verified"}


@dataclass(frozen=True, slots=True)
class Verified:
    key: str
    result: str  # one of RESULTS
    reason: str  # a `MissReason` or a state; "" where all is well
    detail: str  # where all is well: how that is known, if not as always
    bits: int
    recompile: str | None = None  # "ok", or why it is not; None: not asked for, or no piece
    run: str | None = None
    output_digest: str | None = None  # sha256 of what a run gave


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option(
    "--recompile", is_flag=True, help="Compile each piece again: code and libraries must be the same, bit for bit."
)
@click.option(
    "--run",
    is_flag=True,
    help="Run each piece on inputs from a seed: the digest of its outputs must be the stored one.",
)
@cache_options
def command(place: Place, as_json: bool, keys: tuple[str, ...], recompile: bool, run: bool) -> int:
    """Check signatures and digests; nothing is run.

    Every byte is read of the entries named, with their pieces and kernels, or of all entries. Nothing is changed: bad
    files go to quarantine when they are next looked up. --recompile and --run also check what pieces hold, on the
    machine they were compiled for; that imports torch, and runs code only after it was authenticated.
    """
    try:
        store = place.open()
        chosen = find_keys(keys, store) if keys else keys_of(store)
        listing = read_listing(store)
    except (CacheError, UsageError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        return UNTRUSTED if isinstance(error, UntrustedCache) else NOT_VERIFIED
    say_if_there_is_none(place, len(chosen))
    chosen = listing.with_pieces(key for key in chosen if key in listing.by_key)  # not removed since
    found = [verified(store, listing.by_key[key]) for key in chosen]
    if recompile or run:
        found = proved(store, found, recompile=recompile, run=run)
    emit([_record(each) for each in found], _lines(found), as_json=as_json)
    return _bits(found)


def verified(store: Store, row: Row) -> Verified:
    """Return whether the bytes of an entry and its blobs are good; change nothing.

    Pieces of a plan are checked as entries of their own; here they only have to exist.
    """
    found = store.verify(row.key)
    if isinstance(found, Miss):
        bit, reason, detail = BITS[found.reason], found.reason.value, found.detail
    elif row.state == MISSING_PIECES:
        bit, reason, detail = NOT_VERIFIED, row.state, row.detail
    else:
        bit, reason, detail = 0, "", ""
    return Verified(row.key, RESULTS[bit], reason, detail, bit)


def proved(store: Store, found: Sequence[Verified], *, recompile: bool, run: bool) -> list[Verified]:
    """Return `found` after its good pieces were compiled again, run, or both. Imports torch."""
    from piecegraph.tools.cache.entries.proof import Prover
    from piecegraph.tools.command_line.quiet import quiet_libraries

    quiet_libraries()
    with Prover() as prover:
        return [_proved(prover, store, each, recompile=recompile, run=run) for each in found]


def _proved(prover: Prover, store: Store, each: Verified, *, recompile: bool, run: bool) -> Verified:
    loaded = store.verify(each.key)
    if each.bits or isinstance(loaded, Miss) or view(loaded.entry).kind != PIECE:
        return each
    ran = prover.run(loaded) if run else None
    again = prover.recompile(loaded) if recompile else None
    failed = [proof for proof in (ran, again) if proof is not None and proof.problem]
    bits = 0
    for proof in failed:
        bits |= CORRUPT if proof.is_wrong else NOT_VERIFIED
    worst = failed[0] if failed else None
    return replace(
        each,
        result=RESULTS[CORRUPT if bits & CORRUPT else bits],
        reason=worst.problem if worst else "",
        detail=worst.detail if worst else ran.detail if ran is not None else "",
        bits=bits,
        recompile=None if again is None else again.problem or "ok",
        run=None if ran is None else ran.problem or "ok",
        output_digest=ran.output_digest if ran is not None else None,
    )


def _bits(found: Sequence[Verified]) -> int:
    bits = 0
    for each in found:
        bits |= each.bits
    return bits


def _record(each: Verified) -> dict[str, object]:
    return {name: value for name, value in as_plain(each).items() if name != "bits"}


def _lines(found: Sequence[Verified]) -> list[str]:
    rows = [(each.key[:SHOWN], each.result, ": ".join(filter(None, (each.reason, each.detail)))) for each in found]
    counts = [f"{sum(each.result == name for each in found)} {name}" for bit, name in RESULTS.items()]
    return [*table(("KEY", "RESULT", "WHY"), rows), ", ".join(counts)] if found else []
