"""Log probabilities as callers receive them: one object per token, or flat lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(slots=True)
class Logprob:
    """The log probability of one token at one position; names and meanings are vLLM's."""

    logprob: float
    rank: int | None = None
    """The number of tokens that are at least as likely, from 1; top tokens are numbered from 1 in order."""
    decoded_token: str | None = None
    """The token decoded alone, special tokens included; None without a tokenizer or with `detokenize=False`."""


LogprobsOnePosition = dict[int, Logprob]
"""The log probabilities of a position by token id: the position's own token first, then the likeliest tokens in
descending order."""


@dataclass(slots=True)
class FlatLogprobs(MutableSequence[LogprobsOnePosition]):
    """The log probabilities of many positions in six flat lists, which cost the garbage collector six objects.

    A `FlatLogprobs` reads as a list of `LogprobsOnePosition`, each made on access; the lists may also be read
    directly. The entries of position `i` lie from `start_indices[i]` to `end_indices[i]`, exclusive; a position
    without entries (the first of a prompt) reads as an empty dict, as in vLLM. Positions can only be appended.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Append a position; None stands for a position without entries."""
        self.append_entries((token, one.logprob, one.rank, one.decoded_token) for token, one in (value or {}).items())

    def append_entries(self, entries: Iterable[tuple[int, float, int | None, str | None]]) -> None:
        """Append a position with the entries `(token_id, logprob, rank, decoded_token)`, without making objects."""
        self.start_indices.append(len(self.token_ids))
        for token_id, logprob, rank, decoded_token in entries:
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        """Return one position as a new dict, or a slice of positions as a new `FlatLogprobs`."""
        if isinstance(index, slice):
            return self._slice(index)
        entries = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in entries}

    def __iter__(self) -> Iterator[LogprobsOnePosition]:
        for position in range(len(self)):
            yield self[position]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("positions of FlatLogprobs can only be appended, not replaced")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("positions of FlatLogprobs can only be appended, not deleted")

    def insert(self, index: int, value: LogprobsOnePosition | None) -> None:
        """Raise `TypeError`, because positions can only be appended."""
        raise TypeError("positions of FlatLogprobs can only be appended, not inserted; use append")

    def _slice(self, positions: slice) -> FlatLogprobs:
        found = FlatLogprobs()
        start, stop, step = positions.indices(len(self))
        if step == 1:
            stop = max(start, stop)
            first = self.start_indices[start] if start < stop else 0
            last = self.end_indices[stop - 1] if start < stop else 0
            found.start_indices = [at - first for at in self.start_indices[start:stop]]
            found.end_indices = [at - first for at in self.end_indices[start:stop]]
            found.token_ids, found.logprobs = self.token_ids[first:last], self.logprobs[first:last]
            found.ranks, found.decoded_tokens = self.ranks[first:last], self.decoded_tokens[first:last]
            return found
        for position in range(start, stop, step):
            found.append(self[position])
        return found


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
"""The log probabilities of the tokens of an output, in order."""

PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs
"""The log probabilities of the tokens of a prompt, in order; the first token has none."""
