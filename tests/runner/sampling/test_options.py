"""Each option has its place in one list."""

from __future__ import annotations

from piecegraph.runner.sampling.options import OPTIONS


def test_the_order_is_the_one_that_is_promised() -> None:
    """Temperature divides between the penalties and min_p, which comes before top_k and top_p."""
    assert [option.__name__ for option in OPTIONS] == [
        "AllowedTokenIds",
        "BadWords",
        "MinTokens",
        "LogitBias",
        "Penalties",
        "Truncation",
    ]
