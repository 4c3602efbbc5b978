"""Each option has its place in one list."""

from __future__ import annotations

from piecegraph.runner.sampling.all_options import OPTIONS


def test_options_are_applied_in_vllms_order() -> None:
    """Temperature divides between the penalties and min_p, which comes before top_k and top_p."""
    assert [option.__name__ for option in OPTIONS] == [
        "AllowedTokenIds",
        "BadWords",
        "MinTokens",
        "LogitBias",
        "Penalties",
        "Truncation",
    ]
