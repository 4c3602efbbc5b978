from __future__ import annotations

import click
import pytest

from piecegraph.tools.command_line.quantities import BYTES, DURATION, ago_text, bytes_text, seconds_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (10 << 30, "10.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "40 ms"), (12.34, "12.3 s"), (600, "10 min"), (9000, "2.5 h"), (864000, "10.0 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_times() -> None:
    """An entry that cannot be read was never used; a clock that went back makes nothing be used in the future."""
    assert ago_text(1000.0, 1010.4) == "10.0 s ago"
    assert ago_text(1000.0, 990.0) == "0 ms ago"
    assert ago_text(0.0, 990.0) == "never"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1k", 1024), ("1.5 MiB", 3 << 19), ("10GiB", 10 << 30), ("2GB", 2 << 30), ("0", 0)],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert BYTES.convert(text, None, None) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("90min", 5400), ("12h", 43200), ("30d", 2592000), ("1.5 w", 907200)]
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize(("kind", "text"), [(BYTES, "much"), (BYTES, "-1"), (DURATION, "30"), (DURATION, "3 months")])
def test_anything_else_is_refused_with_an_example(kind: click.ParamType[object], text: str) -> None:
    with pytest.raises(click.BadParameter, match="like"):
        kind.convert(text, None, None)
