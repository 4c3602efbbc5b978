"""The command `piecegraph cache diff`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.entry_file import read_entry_file
from piecegraph.cache.store.keys import FactorDifference, diff_factors
from piecegraph.cache.store.store import Store
from piecegraph.errors import CacheError
from piecegraph.tools.cache.entries.contents import ContentFile, Kind, content_files, load
from piecegraph.tools.cache.entries.entry_view import is_too_deep
from piecegraph.tools.cache.entries.factors_text import difference_lines, difference_record
from piecegraph.tools.cache.entries.key_prefix import SHOWN, find_key, keys_of
from piecegraph.tools.cache.terminal.output import emit, printable_lines
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, Command
from piecegraph.tools.command_line.records import as_plain


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A file that differs, or that only one side has."""

    path: str
    kind: str  # "graph", "code" or "data"
    diff: str  # unified, of graphs and code; "" where one of them is not text


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("a")
@click.argument("b")
@click.option("--factors-only", is_flag=True, help="Leave out graphs and generated code.")
@cache_options
def command(place: Place, as_json: bool, a: str, b: str, factors_only: bool) -> None:
    """Show what differs between two entries: factors, graphs, generated code.

    A and B are keys. The exit code is 0 whether or not something differs.
    """
    store = place.open()
    keys = keys_of(store)
    left, right = (find_key(prefix, keys) for prefix in (a, b))
    factors = diff_factors(_entry(store, left).factors, _entry(store, right).factors)
    files: Sequence[FileDifference] | None = None
    if not factors_only:
        try:
            files = diff_files(*(content_files(store, load(store, key)) for key in (left, right)))
        except CacheError as error:
            click.echo(f"only factors are compared: {error}", err=True)
    record = {
        "left": left,
        "right": right,
        "factors": [difference_record(each) for each in factors],
        "files": None if files is None else as_plain(files),
    }
    emit(record, _lines(factors, files, left[:SHOWN], right[:SHOWN]), as_json=as_json)


def diff_files(left: Sequence[ContentFile], right: Sequence[ContentFile]) -> tuple[FileDifference, ...]:
    """Return the differing files: graphs first, then code, then other data. Equal files are left out."""
    ours, theirs = ({file.path: file for file in files} for files in (left, right))
    found = []
    for path in sorted({*ours, *theirs}):
        old, new = ours.get(path), theirs.get(path)
        if old is not None and new is not None and old.data == new.data:
            continue
        either = old or new
        assert either is not None, "a path of one of both"
        texts = ["" if file is None else file.text for file in (old, new)]
        diff = "" if either.kind is Kind.DATA else _unified(path, *texts)
        found.append(FileDifference(path, either.kind.value, diff))
    order = {"graph": 0, "code": 1, "data": 2}
    return tuple(sorted(found, key=lambda each: (order[each.kind], each.path)))


def _unified(path: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return ""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), f"a/{path}", f"b/{path}", lineterm="")
    return "\n".join(lines)


def _entry(store: Store, key: str) -> Entry:
    file = read_entry_file(store.layout, key, store.keyring)
    if file.entry is None:
        problem = file.problem.value if file.problem is not None else ""
        raise CacheError(f"entry {key[:SHOWN]} cannot be compared: it is {problem} ({file.detail}).")
    if is_too_deep(file.entry):
        raise CacheError(f"entry {key[:SHOWN]} cannot be compared: its values are nested too deeply to be ours.")
    return file.entry


def _lines(
    factors: Sequence[FactorDifference], files: Sequence[FileDifference] | None, left: str, right: str
) -> Iterator[str]:
    yield f"{len(factors)} factors differ" if factors else "the factors are the same"
    yield from difference_lines(factors, left, right)
    if files is not None:
        yield f"{len(files)} files differ" if files else "graphs and code are the same"
        for each in files:
            yield printable_lines(each.diff) if each.diff else f"  {each.path} ({each.kind})"
