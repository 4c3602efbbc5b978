from __future__ import annotations

from piecegraph.tools.cache.terminal.output import printable, printable_lines, table


def test_nothing_from_a_file_steers_the_terminal() -> None:
    """Names in entries that are not trusted are shown too."""
    assert printable("\x1b[2Jmodel\r\n\u202e") == "\\x1b[2Jmodel\\r\\n\\u202e"
    assert printable("größe 7") == "größe 7"


def test_code_keeps_its_lines() -> None:
    assert printable_lines("a\n\tb\x1b") == "a\n    b\\x1b"


def test_columns_are_aligned() -> None:
    assert table(("NAME", "N"), [("a", 1), ("long name", 100)], right=("N",)) == [
        "NAME         N",
        "a            1",
        "long name  100",
    ]
