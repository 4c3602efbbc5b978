from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from piecegraph.errors import RequestError
from piecegraph.runner.structured_output.grammars import (
    MOST_COMPILED_AT_ONCE,
    MOST_KEPT,
    MOST_WAITING,
    Grammars,
    GrammarState,
    TooManyGrammars,
)
from piecegraph.runner.structured_output.params import StructuredOutputsParams
from piecegraph.runner.structured_output.protocol import Bitmask


class Letters:
    """A matcher of the tokens 1, 2, 3 in this order: the least that the protocol asks for."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def copy(self) -> Letters:
        made = Letters()
        made.accepted = list(self.accepted)
        return made

    def accept(self, token_ids: Sequence[int]) -> str | None:
        self.accepted += token_ids
        return None if self.accepted == [1, 2, 3][: len(self.accepted)] else f"not {token_ids}"

    def rollback(self, count: int) -> None:
        del self.accepted[len(self.accepted) - count :]

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> str | None:
        bitmask[row] = 1 << (len(self.accepted) + 1)
        return None

    def is_stopped(self) -> bool:
        return self.accepted == [1, 2, 3]

    def reset(self) -> None:
        self.accepted = []


class Backend:
    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.threads: set[int] = set()

    def compile(self, params: StructuredOutputsParams) -> Letters:
        assert params.regex is not None
        self.compiled.append(params.regex)
        self.threads.add(threading.get_ident())
        if params.regex == "bad":
            raise RequestError("a reason")
        return Letters()


def regex(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def test_a_grammar_is_compiled_once_and_by_another_thread() -> None:
    """Each request has a matcher of its own."""
    backend = Backend()
    grammars = Grammars(lambda: backend)
    first, second = grammars.start(regex("a")), grammars.start(regex("a"))
    assert first is not None
    assert second is not None
    assert grammars.start(None) is None
    first.advance([1])
    second.advance([])
    assert backend.compiled == ["a"]
    assert threading.get_ident() not in backend.threads
    assert isinstance(second.matcher, Letters)
    assert second.matcher.accepted == []
    grammars.close()


def test_a_refused_grammar_is_forgotten() -> None:
    backend = Backend()
    grammars = Grammars(lambda: backend)
    for _ in range(2):
        with pytest.raises(RequestError, match="a reason"):
            grammars.start(regex("bad"))
    assert backend.compiled == ["bad", "bad"]
    grammars.close()


class Part:
    """A part of a grammar."""


def test_what_a_refused_grammar_was_made_of_is_freed_at_once() -> None:
    """Before a garbage collection, and although its error is still there."""
    parts: list[weakref.ref[Part]] = []

    class Refusing(Backend):
        def compile(self, params: StructuredOutputsParams) -> Letters:
            part = Part()
            parts.append(weakref.ref(part))
            try:
                raise ValueError("the library's")
            except ValueError as error:
                raise RequestError("a reason") from error

    grammars = Grammars(Refusing)
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        error = grammars.compile(regex("a")).exception(60)
        assert isinstance(error, RequestError) and parts[0]() is None
    finally:
        if is_collecting:
            gc.enable()
    grammars.close()


def test_the_least_recently_used_grammars_are_dropped() -> None:
    backend = Backend()
    grammars = Grammars(lambda: backend)
    for number in range(MOST_KEPT):
        grammars.start(regex(str(number)))
    grammars.start(regex("0"))  # used again
    grammars.start(regex("one more"))
    grammars.start(regex("0"))
    grammars.start(regex("1"))
    assert backend.compiled[MOST_KEPT:] == ["one more", "1"]
    grammars.close()


def test_a_grammar_that_is_held_is_not_dropped() -> None:
    """A request finds its own again, however many others came after it."""
    backend = Backend()
    grammars = Grammars(lambda: backend)
    with grammars.held(regex("mine")) as compiled:
        for number in range(MOST_KEPT + 2):
            grammars.start(regex(str(number)))
        assert grammars.compile(regex("mine")) is compiled
    assert backend.compiled.count("mine") == 1
    for number in range(MOST_KEPT + 2, 2 * MOST_KEPT + 3):
        grammars.start(regex(str(number)))
    grammars.start(regex("mine"))
    assert backend.compiled.count("mine") == 2
    grammars.close()


class BusyBackend(Backend):
    """A backend of which every compile waits until `go` is set; `begun` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.begun = threading.Event(), threading.Semaphore(0)

    def compile(self, params: StructuredOutputsParams) -> Letters:
        self.begun.release()
        assert self.go.wait(60)
        return super().compile(params)


@pytest.fixture
def busy() -> Iterator[tuple[BusyBackend, Grammars]]:
    """Grammars whose threads are all at work."""
    backend = BusyBackend()
    grammars = Grammars(lambda: backend)
    for number in range(MOST_COMPILED_AT_ONCE):
        grammars.compile(regex(f"busy {number}"))
    for _ in range(MOST_COMPILED_AT_ONCE):
        assert backend.begun.acquire(timeout=60)
    yield backend, grammars
    backend.go.set()
    grammars.close()


def test_what_nobody_waits_for_any_more_is_not_compiled(busy: tuple[BusyBackend, Grammars]) -> None:
    """Ten thousand clients that send a grammar and go away leave nothing; one that stays gets its own."""
    backend, grammars = busy
    with grammars.held(regex("stays")) as stays:
        for number in range(10_000):
            with grammars.held(regex(f"gone {number}")) as gone, grammars.held(regex("stays")) as same:
                assert same is stays
            assert gone.cancelled()
        asked = grammars.compile(regex("asked for"))
        with grammars.held(regex("asked for")) as same:
            assert same is asked
        backend.go.set()
        assert stays.result(60) is not None
        assert asked.result(60) is not None
    grammars.close()
    assert sorted(text for text in backend.compiled if "busy" not in text) == ["asked for", "stays"]


def test_too_many_that_wait_are_refused(busy: tuple[BusyBackend, Grammars]) -> None:
    """One that waits already may be asked for nevertheless, and there is room again once one has gone."""
    _, grammars = busy
    with ExitStack() as others:
        for number in range(MOST_WAITING - 1):
            others.enter_context(grammars.held(regex(str(number))))
        with (
            grammars.held(regex("last")),
            grammars.held(regex("last")),
            ExitStack() as stack,
            pytest.raises(TooManyGrammars, match=f"{MOST_WAITING} grammars wait"),
        ):
            stack.enter_context(grammars.held(regex("one more")))
        others.enter_context(grammars.held(regex("one more")))


def test_closing_ends_the_wait_for_what_is_not_begun(busy: tuple[BusyBackend, Grammars]) -> None:
    _, grammars = busy
    with grammars.held(regex("late")) as late:
        grammars.close()
        assert late.cancelled()


def test_progress_follows_from_the_tokens() -> None:
    """Tokens may be told again; after a fresh start all of them are; nothing follows the end."""
    state = GrammarState(Letters())
    state.advance([1])
    state.advance([1])
    state.advance([1, 2])
    assert not state.is_stopped
    state.start_over()
    state.advance([1, 2, 3])
    assert state.is_stopped
    state.advance([1, 2, 3, 9])
    assert state.is_stopped


def test_the_end_is_found_among_several_tokens() -> None:
    """What follows it is no error, and nothing that follows a violation is read."""
    state = GrammarState(Letters())
    state.advance([1, 2])
    assert state.end is None
    state.advance([1, 2, 3, 9, 9])
    assert state.is_stopped and state.end == 3
    state.start_over()
    with pytest.raises(RequestError, match="left its grammar"):
        state.advance([1, 9, 2, 3])
    assert state.end == 2 and not state.is_stopped


def test_a_token_that_is_not_allowed_is_an_error_each_time() -> None:
    state = GrammarState(Letters())
    for _ in range(2):
        with pytest.raises(RequestError, match="left its grammar: not"):
            state.advance([1, 3])
    assert not state.is_stopped
    state.start_over()
    state.advance([1, 2])
