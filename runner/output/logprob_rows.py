"""Log probabilities of a request: rows as steps add them, and the form callers get when they read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

from piecegraph.runner.common.logprobs import FlatLogprobs, Logprob, LogprobsOnePosition, SampleLogprobs
from piecegraph.runner.output.async_output import TokenLogprobs


class LogprobRows:
    """The rows of a request's output tokens; a step only appends a row.

    A slice is the form that callers get: a list with a dict a position, each made once, or `FlatLogprobs`. So tokens
    are decoded when a caller reads them, and not in a step.
    """

    __slots__ = ("_decode", "_is_flat", "_made", "_wanted", "rows")

    def __init__(self, wanted: int, decode: Callable[[int], str] | None, *, is_flat: bool) -> None:
        """Start without rows. `wanted`: likeliest tokens a position, -1 for all. `decode` returns a token's text."""
        self._wanted = wanted
        self._decode = decode
        self._is_flat = is_flat
        self._made: list[LogprobsOnePosition] = []
        self.rows: list[TokenLogprobs] = []
        """For each position the token, then as many likeliest tokens as are wanted."""

    def append(self, row: TokenLogprobs) -> None:
        """Add a position from a batch, whose row may have more tokens than wanted."""
        self.rows.append(truncate_row(row, self._wanted))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...
    @overload
    def __getitem__(self, index: slice) -> SampleLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | SampleLogprobs:
        if isinstance(index, int):
            return one_position(self.rows[index], self._decode)
        if self._is_flat:
            return flat_positions(self.rows[index], self._decode)
        _, stop, _ = index.indices(len(self.rows))
        while len(self._made) < stop:
            self._made.append(one_position(self.rows[len(self._made)], self._decode))
        return self._made[index]


def truncate_row(row: TokenLogprobs, wanted: int) -> TokenLogprobs:
    """Return the token's own entry and those of the `wanted` likeliest tokens (-1: all) of a row that may have more."""
    if wanted < 0 or wanted + 1 >= len(row.token_ids):
        return row
    return TokenLogprobs(row.token_ids[: wanted + 1], row.logprobs[: wanted + 1], row.rank)


def one_position(row: TokenLogprobs, decode: Callable[[int], str] | None) -> LogprobsOnePosition:
    """Return a row by token id: the token first, then the likeliest tokens with ranks from 1.

    A token that is both has the rank of the latter.
    """
    found: LogprobsOnePosition = {}
    for token, logprob, rank, decoded in _entries(row, decode):
        found[token] = Logprob(logprob, rank, decoded)
    return found


def flat_positions(
    rows: list[TokenLogprobs] | list[TokenLogprobs | None], decode: Callable[[int], str] | None
) -> FlatLogprobs:
    """Return several rows as `FlatLogprobs`; None is a position without entries."""
    found = FlatLogprobs()
    for row in rows:
        found.append_entries([] if row is None else _entries(row, decode))
    return found


def _entries(row: TokenLogprobs, decode: Callable[[int], str] | None) -> list[tuple[int, float, int, str | None]]:
    ranks = (row.rank, *range(1, len(row.token_ids)))
    entries = {
        token: (token, logprob, rank, None if decode is None else decode(token))
        for token, logprob, rank in zip(row.token_ids, row.logprobs, ranks, strict=True)
    }
    return list(entries.values())
