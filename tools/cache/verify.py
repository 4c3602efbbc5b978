"""`piecegraph cache verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from piecegraph.cache.entry_file import MissReason
from piecegraph.cache.store import Miss, Store
from piecegraph.errors import CacheError, UntrustedCache, UsageError
from piecegraph.tools.cache.key_prefix import SHOWN, find_keys, keys_of
from piecegraph.tools.cache.listing import MISSING_PIECES, Row, read_listing
from piecegraph.tools.cache.output import emit, table
from piecegraph.tools.cache.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.options import CONTEXT, Command
from piecegraph.tools.records import as_plain

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
    detail: str
    bit: int


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@cache_options
def command(place: Place, as_json: bool, keys: tuple[str, ...]) -> int:
    """Check signatures and digests, and nothing is run.

    Of the entries named, or of all: every byte is read. Nothing is changed: bad files go to quarantine when they are
    next looked up.
    """
    try:
        store = place.open()
        chosen = find_keys(keys, store) if keys else keys_of(store)
        listing = read_listing(store)
    except (CacheError, UsageError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        return UNTRUSTED if isinstance(error, UntrustedCache) else NOT_VERIFIED
    say_if_there_is_none(place, len(chosen))
    found = [verified(store, listing.by_key[key]) for key in chosen if key in listing.by_key]  # not removed since
    emit([_record(each) for each in found], _lines(found), as_json=as_json)
    return _bits(found)


def verified(store: Store, row: Row) -> Verified:
    """What the bytes of an entry and its blobs are worth; changes nothing. Pieces of a plan are looked at as entries
    of their own; here they must be there."""
    found = store.verify(row.key)
    if isinstance(found, Miss):
        bit, reason, detail = BITS[found.reason], found.reason.value, found.detail
    elif row.state == MISSING_PIECES:
        bit, reason, detail = NOT_VERIFIED, row.state, row.detail
    else:
        bit, reason, detail = 0, "", ""
    return Verified(row.key, RESULTS[bit], reason, detail, bit)


def _bits(found: Sequence[Verified]) -> int:
    bits = 0
    for each in found:
        bits |= each.bit
    return bits


def _record(each: Verified) -> dict[str, object]:
    return {name: value for name, value in as_plain(each).items() if name != "bit"}


def _lines(found: Sequence[Verified]) -> list[str]:
    rows = [(each.key[:SHOWN], each.result, ": ".join(filter(None, (each.reason, each.detail)))) for each in found]
    counts = [f"{sum(each.bit == bit for each in found)} {name}" for bit, name in RESULTS.items()]
    return [*table(("KEY", "RESULT", "WHY"), rows), ", ".join(counts)] if found else []
