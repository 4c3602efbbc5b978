"""The number of matches and misses of each pass in each family: the committed table, and its generator.

Run `python -m tests.passes.golden_matches` to write the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from piecegraph.passes.pipeline import all_passes
from tests.passes.family_runs import family
from tests.runner.tiny_models import FAMILIES, UNLISTED

TABLE = Path(__file__).with_name("golden_matches.json")
COMMAND = "python -m tests.passes.golden_matches"
DTYPE = torch.bfloat16
"""The dtype that models are served in, whose graphs have casts that float32 graphs lack."""

Matches = dict[str, dict[str, int]]  # pass -> {"matches": n, "misses": n}


def found_matches(name: str) -> Matches:
    """Return what every built-in pass finds in traced family `name`. No pass may fail."""
    passes = all_passes()
    outcomes = family(name, DTYPE).apply(*passes)
    return {
        each.name: {"matches": outcome.matches, "misses": len(outcome.misses)}
        for each, outcome in zip(passes, outcomes, strict=True)
    }


def committed_matches() -> dict[str, Matches]:
    table: dict[str, Matches] = json.loads(TABLE.read_text())
    return table


def difference(committed: Mapping[str, Mapping[str, int]], found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A line for each pass that is not what was committed."""
    return [
        f"{name}: committed {committed.get(name)}, found {found.get(name)}"
        for name in dict.fromkeys((*committed, *found))
        if committed.get(name) != found.get(name)
    ]


def main() -> None:
    table = {name: found_matches(name) for name in (*FAMILIES, *UNLISTED)}
    families = [
        f"  {json.dumps(family_name)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        + "\n  }"
        for family_name, rows in table.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(families) + "\n}\n")


if __name__ == "__main__":
    main()
