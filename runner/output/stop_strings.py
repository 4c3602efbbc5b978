"""The search for the stop string that ends a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string and the index of its first character in the text."""

    stop_string: str
    start: int

    @property
    def end(self) -> int:
        """The index after its last character."""
        return self.start + len(self.stop_string)


def find_stop_string(text: str, num_searched: int, stop_strings: Sequence[str]) -> StopMatch | None:
    """Return the stop string that ends a text whose first `num_searched` characters were searched before, or None.

    A match ends after these characters and may begin among them. Of several matches the one that ends first wins, and
    of those that end at the same index the one that comes first in `stop_strings`: the one that a search after each
    character would have found [vLLM's rule].
    """
    best: StopMatch | None = None
    for stop_string in stop_strings:
        start = text.find(stop_string, max(0, num_searched - len(stop_string) + 1))
        if start >= 0 and (best is None or start + len(stop_string) < best.end):
            best = StopMatch(stop_string, start)
    return best
