"""Rows become dictionaries or flat lists when somebody looks, each once."""

from __future__ import annotations

from piecegraph.runner.common.logprobs import FlatLogprobs, Logprob
from piecegraph.runner.output.async_output import TokenLogprobs
from piecegraph.runner.output.logprob_rows import LogprobRows, truncate_row

ROW = TokenLogprobs([5, 7, 5, 9], [-2.0, -1.0, -2.0, -3.0], 3)


def test_a_row_is_truncated_to_the_wanted_tokens() -> None:
    """A batch may have asked for more. -1 is all."""
    assert truncate_row(ROW, 0) == TokenLogprobs([5], [-2.0], 3)
    assert truncate_row(ROW, 1) == TokenLogprobs([5, 7], [-2.0, -1.0], 3)
    assert truncate_row(ROW, 3) is truncate_row(ROW, 9) is truncate_row(ROW, -1) is ROW


def test_tokens_are_decoded_once_and_only_when_read() -> None:
    decoded: list[int] = []

    def decode(token: int) -> str:
        decoded.append(token)
        return str(token)

    rows = LogprobRows(1, decode, is_flat=False)
    for _ in range(3):
        rows.append(ROW)
    assert (len(rows), decoded) == (3, [])
    one = {5: Logprob(-2.0, 3, "5"), 7: Logprob(-1.0, 1, "7")}
    assert rows[0] == one
    decoded.clear()
    assert rows[:2] == rows[:2] == [one, one] and decoded == [5, 7] * 2
    assert rows[1:] == [one, one] and rows[3:] == []


def test_flat_rows_are_flat_slices() -> None:
    """With the rank that is among the likeliest for a token that is there too."""
    flat, plain = (LogprobRows(-1, None, is_flat=is_flat) for is_flat in (True, False))
    for rows in (flat, plain):
        rows.append(ROW)
        rows.append(truncate_row(ROW, 0))
    found = flat[0:2]
    assert isinstance(found, FlatLogprobs) and list(found) == plain[0:2]
    assert (found.token_ids, found.ranks) == ([5, 7, 9, 5], [2, 1, 3, 3])
