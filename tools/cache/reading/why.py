"""The command `piecegraph cache why`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from piecegraph.cache.store.entry_file import MissReason
from piecegraph.cache.store.keys import FactorDifference, diff_factors
from piecegraph.cache.store.store import Loaded, Miss, Store
from piecegraph.compiler.common.private_folder import scratch_folder
from piecegraph.tools.cache.entries.entry_view import is_of_the_same, is_too_deep
from piecegraph.tools.cache.entries.factors_text import alike, difference_lines, difference_record
from piecegraph.tools.cache.entries.key_prefix import SHOWN, find_key
from piecegraph.tools.cache.entries.listing import MISSING_PIECES, Listing, Row, read_listing
from piecegraph.tools.cache.terminal.output import emit, printable
from piecegraph.tools.cache.terminal.place import Place, cache_options, say_if_there_is_none
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, flags, given


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The entry of the same kind that differs in the fewest factors, with similar ones counted once.

    Entries of the same graph or class of model are preferred.
    """

    row: Row
    differences: tuple[FactorDifference, ...]  # left: what was asked about; right: this entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The reason why the cache has, or has not, something to load for the request."""

    asked: str
    key: str | None  # None: a model of which nothing is kept
    reason: str  # "" for a hit, else a `MissReason`, `MISSING_PIECES`, or why nothing is kept of it
    detail: str
    nearest: Nearest | None  # None for a hit of a model, and where there is no other entry of its kind (before it)


EPILOG = """\b
Examples:
  piecegraph cache why 3f2a91
  piecegraph cache why ./my-model --dtype bfloat16 --compiler inductor"""


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("asked", metavar="MODEL|KEY...", nargs=-1, required=True)
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@cache_options
def command(place: Place, as_json: bool, asked: tuple[str, ...], **values: Any) -> None:
    """Explain why there was a hit, or none: the factors that differ.

    For a MODEL (as for `piecegraph explain`, with its flags): the key it has now, whether it would be loaded, and, if
    not, what distinguishes it from the nearest entry. Its config is read and its weights are not; this imports torch.
    For a KEY: whether it can be loaded, and what distinguishes it from the nearest entry that was there before it:
    that is why it was compiled.
    """
    store = place.open()
    listing = read_listing(store)
    say_if_there_is_none(place, len(listing.rows))
    answers = []
    for text in asked:
        if not is_key(text):
            answers.append(why_model(store, listing, text, values))
        elif listing.rows:
            answers.append(why_key(store, listing, text))
    emit([as_record(each) for each in answers], _lines(answers), as_json=as_json)


def is_key(text: str) -> bool:
    """Return whether `text` is the first digits of a key: hexadecimal, and no existing file of that name.

    Anything else names a model.
    """
    return re.fullmatch(r"[0-9a-fA-F]{1,64}", text) is not None and not Path(text).exists()


def why_model(store: Store, listing: Listing, model: str, values: dict[str, Any]) -> Answer:
    """Explain what `LLM` would find now. Raises what it would for the model and its arguments. Imports torch."""
    from piecegraph.tools.cache.entries.model_key import changed_source, model_key
    from piecegraph.tools.command_line.compile_flags import engine_config
    from piecegraph.tools.command_line.quiet import quiet_libraries
    from piecegraph.tools.command_line.shapes import model_folder

    quiet_libraries()
    with scratch_folder() as scratch:
        arguments = with_compile_flags(given(LLM_FLAGS, values), values)
        found = model_key(engine_config(model_folder(model, scratch), arguments))
    if found.key is None:
        return Answer(asked=model, key=None, reason=found.reason, detail="", nearest=None)
    row = listing.by_key.get(found.key)
    reason, detail = (MissReason.ABSENT.value, "") if row is None else state_of(store, row)
    loaded = store.verify(found.key)
    changed = changed_source(loaded) if isinstance(loaded, Loaded) else None
    if not reason and changed is not None:
        reason, detail = "source changed", changed
    nearest = nearest_entry(found.key, found.factors, listing) if row is None else None
    return Answer(asked=model, key=found.key, reason=reason, detail=detail, nearest=nearest)


def why_key(store: Store, listing: Listing, prefix: str) -> Answer:
    """Explain an existing entry. Raises `UsageError` if the prefix matches none, or several."""
    row = listing.by_key[find_key(prefix, sorted(listing.by_key))]
    entry = row.listed.file.entry
    reason, detail = state_of(store, row)
    if entry is None or is_too_deep(entry):
        return Answer(asked=prefix, key=row.key, reason=reason, detail=detail, nearest=None)
    nearest = nearest_entry(row.key, entry.factors, listing, before=entry.created)
    return Answer(asked=prefix, key=row.key, reason=reason, detail=detail, nearest=nearest)


def state_of(store: Store, row: Row) -> tuple[str, str]:
    """Return the reason why an entry cannot be loaded, "" if it can be, and a detail. Every byte of it is read."""
    found = store.verify(row.key)
    if isinstance(found, Miss):
        return found.reason.value, found.detail
    return (row.state, row.detail) if row.state == MISSING_PIECES else ("", "")


def nearest_entry(
    key: str, factors: Mapping[str, Any], listing: Listing, *, before: float | None = None
) -> Nearest | None:
    """Return the nearest other entry of the same kind, made before `before`."""
    others = [(row, row.listed.file.entry) for row in listing.rows if row.key != key]
    others = [(row, entry) for row, entry in others if entry is not None and not is_too_deep(entry)]
    alikes = [(row, entry) for row, entry in others if entry and entry.factors.get("kind") == factors.get("kind")]
    candidates = [(row, entry) for row, entry in alikes if before is None or entry.created < before]
    same = [(row, entry) for row, entry in candidates if is_of_the_same(factors, entry.factors)]
    rated = [(diff_factors(factors, entry.factors), row, entry.created) for row, entry in same or candidates]
    if not rated:
        return None
    differences, row, _ = min(rated, key=lambda each: (len(alike(each[0])), -each[2], each[1].key))
    return Nearest(row=row, differences=differences)


def as_record(answer: Answer) -> dict[str, Any]:
    """Return the record for `--json`."""
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
        if answer.key is None:
            yield f"{printable(answer.asked)}  is not kept: {why}"
            continue
        asked = f"{printable(answer.asked)}: " if not is_key(answer.asked) else ""
        yield f"{asked}{answer.key[:SHOWN]}  " + (f"miss: {why}" if answer.reason else "hit: it can be loaded")
        nearest = answer.nearest
        if nearest is None:
            if is_key(answer.asked):
                yield "  no entry of its kind was there before it"
            elif answer.reason == MissReason.ABSENT.value:
                yield "  there is no entry of its kind to compare it with"
            continue
        row = nearest.row
        model = f", {printable(row.view.title)}" if row.view is not None and row.view.title else ""
        yield f"  nearest: {row.key[:SHOWN]} ({row.state}{model}), which differs in"
        yield from difference_lines(nearest.differences, answer.key[:SHOWN], row.key[:SHOWN])
