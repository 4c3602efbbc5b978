"""The checks of `CompileConfig.expect`: a pass without the expected matches is an error that shows why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from piecegraph.compiler.common.report import PassRow
from piecegraph.errors import PassExpectation
from piecegraph.passes.matching.graph_pass import Miss

MISSES_SHOWN = 3


def check_expected_run(expect: Mapping[str, int | str], names: Iterable[str]) -> None:
    """Raise `PassExpectation` if a pass of `expect` is not among those that run."""
    running = tuple(names)
    for name, wanted in expect.items():
        if name not in running and wanted != 0:
            raise PassExpectation(
                f"pass {name!r} is expected to match ({wanted!r}), but it does not run here; passes that do: "
                f"{', '.join(running) or 'none'}. Name it in passes."
            )


def check_expected_matches(expect: Mapping[str, int | str], rows: Iterable[PassRow]) -> None:
    """Raise `PassExpectation` if the matches of a row are not those `expect` has for its pass."""
    for row in rows:
        wanted = expect.get(row.name)
        if wanted is None or (wanted == "all" and row.matches and not row.misses and not row.error):
            continue
        if wanted == row.matches and not row.error:
            continue
        times = "every site to match" if wanted == "all" else f"{wanted} matches"
        raise PassExpectation(f"pass {row.name!r}: expected {times}, found {row.matches}{_why(row)}")


def _why(row: PassRow) -> str:
    if row.error:
        return f"; it was undone: {row.error}."
    if row.note:
        return f"; {row.note}."
    if not row.misses:
        return " and no site that looks like another."
    shown = "".join(f"\n  {_line(miss)}" for miss in row.misses[:MISSES_SHOWN])
    more = len(row.misses) - MISSES_SHOWN
    rest = f"\n  and {more} more" if more > 0 else ""
    return f", with {len(row.misses)} sites that did not match:{shown}{rest}"


def _line(miss: Miss) -> str:
    return f"{miss.node}: {miss.reason}" + (f", at {miss.line}" if miss.line else "")
