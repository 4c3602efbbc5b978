from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from piecegraph.tools.command_line.records import as_plain


@dataclass(frozen=True)
class Row:
    name: str
    paths: tuple[Path, ...]


def test_a_record_is_plain_data() -> None:
    """Dataclasses, mappings and sequences to any depth; what JSON does not know becomes text."""
    assert as_plain({1: [Row("a", (Path("b"),))], "c": None}) == {"1": [{"name": "a", "paths": ["b"]}], "c": None}
