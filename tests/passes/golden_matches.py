"""The number of matches and misses of each pass in each family: the committed table, and its generator.

Run `python -m tests.passes.golden_matches` to write the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from piecegraph.passes.pipeline import all_passes
from tests.passes.family_runs import family, family_of_rank
from tests.runner.tiny_models import FAMILIES, UNLISTED

TABLE = Path(__file__).with_name("golden_matches.json")
COMMAND = "python -m tests.passes.golden_matches"
DTYPE = torch.bfloat16
"""The dtype that models are served in, whose graphs have casts that float32 graphs lack."""

OF_TWO_RANKS = {f"{name}, rank 0 of 2": name for name in ("llama", "gemma3", "phi3")}
"""The families that are traced as one rank's part too, which has collectives."""

Matches = dict[str, dict[str, int]]  # pass -> {"matches": n, "misses": n}


def found_matches(name: str) -> Matches:
    """Return what every built-in pass finds in traced family `name`, or a row of `OF_TWO_RANKS`. No pass may fail."""
    passes = all_passes()
    whole = OF_TWO_RANKS.get(name)
    outcomes = (family(name, DTYPE) if whole is None else family_of_rank(whole, DTYPE, 0, 2)).apply(*passes)
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
    table = {name: found_matches(name) for name in (*FAMILIES, *UNLISTED, *OF_TWO_RANKS)}
    families = [
        f"  {json.dumps(family_name)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        + "\n  }"
        for family_name, rows in table.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(families) + "\n}\n")


if __name__ == "__main__":
    main()
