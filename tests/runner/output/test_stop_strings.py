"""The stop string that ends first wins, then the order given; one may begin in text that was searched before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.runner.output.stop_strings import StopMatch, find_stop_string


@pytest.mark.parametrize(
    ("text", "num_searched", "stop_strings", "match"),
    [
        ("one the end", 0, ["the end", "end"], StopMatch("the end", 4)),  # both end there: the order given
        ("one the end", 0, ["end", "the end"], StopMatch("end", 8)),
        ("abcd", 0, ["abcd", "c"], StopMatch("c", 2)),  # begins later, ends first
        ("abcd", 0, ["bcd", "b"], StopMatch("b", 1)),
        ("abab", 2, ["ab"], StopMatch("ab", 2)),  # the first lies in what was searched
        ("abab", 1, ["ab"], StopMatch("ab", 0)),  # straddles
        ("ab", 2, ["ab"], None),
        ("ab", 0, ["abc"], None),
        ("", 0, ["a"], None),
        ("ab", 0, [], None),
    ],
)
def test_the_match_that_ends_first_wins(
    text: str, num_searched: int, stop_strings: list[str], match: StopMatch | None
) -> None:
    assert find_stop_string(text, num_searched, stop_strings) == match


@given(st.text("ab", max_size=10), st.integers(0, 10), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_the_match_equals_that_of_a_search_by_character(text: str, num_searched: int, stop_strings: list[str]) -> None:
    expected = None
    for length in range(num_searched + 1, len(text) + 1):
        ending = [stop for stop in stop_strings if text[:length].endswith(stop)]
        if ending:
            expected = StopMatch(ending[0], length - len(ending[0]))
            break
    assert find_stop_string(text, num_searched, stop_strings) == expected
