"""`piecegraph cache why`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from piecegraph.cache.keys import FactorDifference, diff_factors
from piecegraph.cache.store import Miss, Store
from piecegraph.tools.cache.entry_view import is_of_the_same
from piecegraph.tools.cache.factors_text import alike, difference_lines, difference_record
from piecegraph.tools.cache.key_prefix import SHOWN, find_key
from piecegraph.tools.cache.listing import MISSING_PIECES, Listing, Row, read_listing
from piecegraph.tools.cache.output import emit, printable
from piecegraph.tools.cache.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.options import CONTEXT, Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The entry of the same kind that differs in the fewest factors, those alike counted once; one of the same graph
    or class of model, where there is any."""

    row: Row
    differences: tuple[FactorDifference, ...]  # left: what was asked about; right: this entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Why there is something to load for what was asked, or nothing."""

    asked: str
    key: str
    reason: str  # "" for a hit, else a `MissReason`, or `MISSING_PIECES`
    detail: str
    nearest: Nearest | None  # None where there is no other entry of its kind


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("asked", metavar="KEY...", nargs=-1, required=True)
@cache_options
def command(place: Place, as_json: bool, asked: tuple[str, ...]) -> None:
    """Why there was a hit, or none: the factors that differ.

    For a KEY: whether it can be loaded, and what distinguishes it from the nearest entry that was there before it:
    that is why it was compiled.
    """
    store = place.open()
    listing = read_listing(store)
    say_if_there_is_none(place, len(listing.rows))
    answers = [why_key(store, listing, text) for text in asked] if listing.rows else []
    emit([as_record(each) for each in answers], _lines(answers), as_json=as_json)


def why_key(store: Store, listing: Listing, prefix: str) -> Answer:
    """About an entry that is there. Raises `UsageError` where the prefix names none, or several."""
    row = listing.by_key[find_key(prefix, sorted(listing.by_key))]
    entry = row.listed.file.entry
    reason, detail = state_of(store, row)
    nearest = nearest_entry(row.key, entry.factors, listing, before=entry.created) if entry is not None else None
    return Answer(asked=prefix, key=row.key, reason=reason, detail=detail, nearest=nearest)


def state_of(store: Store, row: Row) -> tuple[str, str]:
    """The reason why an entry cannot be loaded, "" where it can be, and a word more. Every byte of it is read."""
    found = store.verify(row.key)
    if isinstance(found, Miss):
        return found.reason.value, found.detail
    return (row.state, row.detail) if row.state == MISSING_PIECES else ("", "")


def nearest_entry(
    key: str, factors: Mapping[str, Any], listing: Listing, *, before: float | None = None
) -> Nearest | None:
    """The nearest other entry of the same kind; of those made before `before`, if there are any."""
    others = [(row, row.listed.file.entry) for row in listing.rows if row.key != key]
    alikes = [(row, entry) for row, entry in others if entry and entry.factors.get("kind") == factors.get("kind")]
    older = [(row, entry) for row, entry in alikes if before is not None and entry.created < before]
    candidates = older or alikes
    same = [(row, entry) for row, entry in candidates if is_of_the_same(factors, entry.factors)]
    rated = [(diff_factors(factors, entry.factors), row, entry.created) for row, entry in same or candidates]
    if not rated:
        return None
    differences, row, _ = min(rated, key=lambda each: (len(alike(each[0])), -each[2], each[1].key))
    return Nearest(row=row, differences=differences)


def as_record(answer: Answer) -> dict[str, Any]:
    """For `--json`."""
    nearest = answer.nearest
    return {
        "asked": answer.asked,
        "key": answer.key,
        "is_hit": not answer.reason,
        "reason": answer.reason,
        "detail": answer.detail,
        "nearest": None
        if nearest is None
        else {
            "key": nearest.row.key,
            "model": nearest.row.view.title if nearest.row.view else None,
            "state": nearest.row.state,
            "differences": [difference_record(each) for each in nearest.differences],
        },
    }


def _lines(answers: Sequence[Answer]) -> Iterator[str]:
    for answer in answers:
        why = printable(": ".join(filter(None, (answer.reason, answer.detail))))
        yield f"{answer.key[:SHOWN]}  " + (f"miss: {why}" if answer.reason else "hit: it can be loaded")
        nearest = answer.nearest
        if nearest is None:
            yield "  there is no other entry of its kind to compare it with"
            continue
        row = nearest.row
        model = f", {printable(row.view.title)}" if row.view is not None and row.view.title else ""
        yield f"  nearest: {row.key[:SHOWN]} ({row.state}{model}), which differs in"
        yield from difference_lines(nearest.differences, answer.key[:SHOWN], row.key[:SHOWN])
