"""`piecegraph cache why`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from piecegraph.cache.keys import FactorDifference, diff_factors
from piecegraph.cache.store import Listed, Miss, Store
from piecegraph.tools.cache.entry_view import view
from piecegraph.tools.cache.factors_text import alike, difference_lines, difference_record
from piecegraph.tools.cache.key_prefix import SHOWN, find_key
from piecegraph.tools.cache.output import emit, printable
from piecegraph.tools.cache.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.options import CONTEXT, Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The entry of the same kind that differs in the fewest factors, those alike counted once."""

    key: str
    model: str | None
    state: str
    differences: tuple[FactorDifference, ...]  # left: what was asked about; right: this entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Why there is something to load for what was asked, or nothing."""

    asked: str
    key: str
    is_hit: bool
    reason: str  # "" for a hit, else a `MissReason`
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
    listed = store.list()
    say_if_there_is_none(place, len(listed))
    answers = [why_key(store, listed, text) for text in asked] if listed else []
    emit([as_record(each) for each in answers], _lines(answers), as_json=as_json)


def why_key(store: Store, listed: Sequence[Listed], prefix: str) -> Answer:
    """About an entry that is there. Raises `UsageError` where the prefix names none, or several."""
    key = find_key(prefix, sorted(row.key for row in listed))
    entry = next(row.file.entry for row in listed if row.key == key)
    found = store.verify(key)
    miss = found if isinstance(found, Miss) else None
    return Answer(
        asked=prefix,
        key=key,
        is_hit=miss is None,
        reason=miss.reason.value if miss else "",
        detail=miss.detail if miss else "",
        nearest=nearest_entry(key, entry.factors, listed, before=entry.created) if entry is not None else None,
    )


def nearest_entry(
    key: str, factors: Mapping[str, Any], listed: Sequence[Listed], *, before: float | None = None
) -> Nearest | None:
    """The nearest other entry of the same kind; of those made before `before`, if there are any."""
    others = [(row, row.file.entry) for row in listed if row.key != key and row.file.entry is not None]
    others = [(row, entry) for row, entry in others if entry.factors.get("kind") == factors.get("kind")]
    older = [(row, entry) for row, entry in others if before is not None and entry.created < before]
    rated = [(diff_factors(factors, entry.factors), row, entry) for row, entry in older or others]
    if not rated:
        return None
    differences, row, entry = min(rated, key=lambda each: (len(alike(each[0])), -each[2].created, each[1].key))
    return Nearest(key=row.key, model=view(entry).model, state=row.state, differences=differences)


def as_record(answer: Answer) -> dict[str, Any]:
    """For `--json`."""
    nearest = answer.nearest
    return {
        "asked": answer.asked,
        "key": answer.key,
        "is_hit": answer.is_hit,
        "reason": answer.reason,
        "detail": answer.detail,
        "nearest": None
        if nearest is None
        else {
            "key": nearest.key,
            "model": nearest.model,
            "state": nearest.state,
            "differences": [difference_record(each) for each in nearest.differences],
        },
    }


def _lines(answers: Sequence[Answer]) -> Iterator[str]:
    for answer in answers:
        why = printable(": ".join(filter(None, (answer.reason, answer.detail))))
        yield f"{answer.key[:SHOWN]}  " + ("hit: it can be loaded" if answer.is_hit else f"miss: {why}")
        nearest = answer.nearest
        if nearest is None:
            yield "  there is no other entry of its kind to compare it with"
            continue
        model = f", {printable(nearest.model)}" if nearest.model else ""
        yield f"  nearest: {nearest.key[:SHOWN]} ({nearest.state}{model}), which differs in"
        yield from difference_lines(nearest.differences, answer.key[:SHOWN], nearest.key[:SHOWN])
