"""How subcommands print: a JSON value or lines, on stdout. What comes from files cannot steer the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click


def emit(value: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """`value` as JSON, or `lines`."""
    if as_json:
        emit_json(value)
    else:
        emit_lines(lines)


def emit_json(value: Any) -> None:
    """On one line."""
    click.echo(json.dumps(value))


def emit_lines(lines: Iterable[str]) -> None:
    text = "\n".join(lines)
    if text:
        click.echo(text)


def printable(value: object) -> str:
    """As text on one line: characters that a terminal might obey are written as escapes."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """As `printable`, with line ends and tabs kept: for code."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> list[str]:
    """Lines with columns two spaces apart; those named in `right` are aligned there."""
    texts = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    at_right = [name in right for name in header]
    return [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, at_right, strict=True)
        ).rstrip()
        for row in texts
    ]
