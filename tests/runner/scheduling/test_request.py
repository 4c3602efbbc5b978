"""Known, pending and computed tokens of one request."""

from __future__ import annotations

import pytest

from tests.runner.scheduling.make_request import make_request


def test_pending_tokens_are_those_the_host_does_not_know() -> None:
    """A token that becomes known moves from pending to known; their sum stays."""
    request = make_request("a", [1, 2, 3])
    assert (request.num_tokens, request.num_pending_tokens) == (3, 0)
    request.num_tokens_with_pending += 1
    assert (request.num_tokens, request.num_pending_tokens) == (3, 1)
    request.output_token_ids.append(7)
    assert (request.num_tokens, request.num_pending_tokens) == (4, 0)


@pytest.mark.parametrize(("start", "end"), [(start, end) for end in range(6) for start in range(end + 1)])
def test_token_ids_run_over_prompt_and_output(start: int, end: int) -> None:
    request = make_request("a", [1, 2, 3])
    request.output_token_ids += [4, 5]
    assert request.token_ids(start, end) == [1, 2, 3, 4, 5][start:end]


def test_token_ids_are_a_copy() -> None:
    request = make_request("a", [1, 2, 3])
    request.token_ids(0, 3).append(9)
    assert request.prompt_token_ids == [1, 2, 3]


def test_requests_are_equal_only_if_they_are_one() -> None:
    """An id may be used again; the scheduler must not take one request for another."""
    assert make_request("a", [1]) != make_request("a", [1])


def test_prompt_logprobs_are_wanted_only_if_asked_for() -> None:
    assert make_request("a", 3, prompt_logprobs=True).wants_prompt_logprobs
    assert not make_request("a", 3).wants_prompt_logprobs
