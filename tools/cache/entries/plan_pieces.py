"""The pieces of a plan, as listed in its blob (docs/cache_format.md, "The plan")."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from piecegraph.cache.disk.layout import is_digest
from piecegraph.cache.store.store import Loaded
from piecegraph.tools.cache.entries.entry_view import view


@dataclass(frozen=True, slots=True)
class PlanPiece:
    """A unique piece of a plan, dynamic or at one static size."""

    key: str
    unique: int | None  # its index; None where the plan is of another version and does not say
    size: int | None  # None: the dynamic one
    shared_by: int  # pieces of the model it runs
    takes: tuple[str, ...]  # names of the sizes it depends on

    @property
    def name(self) -> str:
        """The name of the piece, as in `"piece_1"` or `"piece_1_size_8"`; the key if nothing better is known."""
        name = f"piece_{self.key[:12] if self.unique is None else self.unique}"
        return name if self.size is None else f"{name}_size_{self.size}"


def plan_pieces(loaded: Loaded) -> tuple[PlanPiece, ...]:
    """Return the pieces in order; none for an entry that is not a plan."""
    try:
        found = _from_plan(json.loads(loaded.blobs["plan"]))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError):
        # no plan, or one of another version
        found = []
    if not all(is_digest(piece.key) for piece in found):
        found = []
    named = {piece.key for piece in found}
    others = [PlanPiece(key, None, None, 0, ()) for key in view(loaded.entry).pieces if key not in named]
    return (*found, *others)


def _from_plan(plan: Any) -> list[PlanPiece]:
    steps = plan["plan"]["steps"]
    shared_by = Counter(step["unique"] for step in steps if "unique" in step)
    names = plan["size_symbols"]
    takes = [tuple(sorted(str(names.get(symbol, symbol)) for symbol in symbols)) for symbols in plan["symbols"]]
    found: list[tuple[str, int, int | None]] = [(key, unique, None) for unique, key in enumerate(plan["pieces"])]
    found += [(each["key"], int(each["unique"]), int(each["size"])) for each in plan["static"]]
    return [PlanPiece(key, unique, size, shared_by[unique], takes[unique]) for key, unique, size in found]
