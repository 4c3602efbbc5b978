"""The output of subcommands: a JSON value or lines, on stdout. Text from files cannot control the terminal.

Tables are made here in ten lines: rich wraps cells to the terminal's width, so that a pipe would not get whole keys,
and importing it takes 0.05 s of the 0.3 s that `cache ls` may take.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click


def emit(value: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print `value` as JSON, or `lines`."""
    if as_json:
        emit_json(value)
    else:
        emit_lines(lines)


def emit_json(value: Any) -> None:
    """Print a value as JSON on one line."""
    click.echo(json.dumps(value))


def emit_lines(lines: Iterable[str]) -> None:
    text = "\n".join(lines)
    if text:
        click.echo(text)


def printable(value: object) -> str:
    """Return text on one line, with characters that a terminal might obey written as escapes."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Return text as `printable` does, but keep line ends and tabs, for code."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> list[str]:
    """Return lines with columns two spaces apart; the columns named in `right` are right-aligned."""
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
