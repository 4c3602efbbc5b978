"""The compiled grammars of an engine, and the progress of its requests through them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from piecegraph.errors import PiecegraphError, RequestError
from piecegraph.runner.structured_output.params import StructuredOutputsParams, as_structured_outputs
from piecegraph.runner.structured_output.protocol import Bitmask, GrammarMatcher, StructuredOutputBackend

MOST_KEPT = 256
"""Compiled grammars that are kept; the least recently used are dropped, but none that a request holds."""

MOST_COMPILED_AT_ONCE = 2
"""Threads that compile, made when the first grammar is asked for."""

MOST_WAITING = 256
"""Grammars that may wait for one of these threads when a request asks to hold another one."""


class TooManyGrammars(PiecegraphError):
    """A grammar cannot be compiled now, because too many others wait for it; it can be asked for later."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A grammar that was asked for."""

    compiled: Future[GrammarMatcher] = field(default_factory=Future)
    num_holders: int = 0
    is_asked_for: bool = False  # by `compile`, whose caller may wait for it without holding it


class Grammars:
    """Grammars by a hash of their parameters, compiled by threads of their own. May be called by any thread.

    The backend is made by the first of these threads, because reading a vocabulary takes a second.
    """

    def __init__(self, make_backend: Callable[[], StructuredOutputBackend]) -> None:
        self._make_backend = make_backend
        self._backend: StructuredOutputBackend | None = None
        self._backend_lock = threading.Lock()
        self._lock = threading.Lock()  # over everything below
        self._kept: OrderedDict[str, _Entry] = OrderedDict()
        self._waiting: OrderedDict[str, StructuredOutputsParams] = OrderedDict()  # of `_kept`, not yet begun
        self._num_working = 0  # threads that take from `_waiting`
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, params: StructuredOutputsParams | Mapping[str, Any]) -> Future[GrammarMatcher]:
        """Return the grammar's compiled form as a future, which raises `RequestError` for what cannot be compiled.

        Its matcher is shared: `copy` it.
        """
        params = as_structured_outputs(params)
        digest = params.digest()
        with self._lock:
            entry = self._entry(digest, params)
            entry.is_asked_for = True
            return entry.compiled

    @contextmanager
    def held(self, params: StructuredOutputsParams | Mapping[str, Any]) -> Iterator[Future[GrammarMatcher]]:
        """Ask for a grammar as `compile` does, and keep it until the end of the block.

        If the last block that holds a grammar ends before its compile has begun, it is not compiled: a client that
        goes away leaves no work. Raises `TooManyGrammars` if `MOST_WAITING` others wait.
        """
        params = as_structured_outputs(params)
        digest = params.digest()
        with self._lock:
            if digest not in self._kept and len(self._waiting) >= MOST_WAITING:
                raise TooManyGrammars(
                    f"{len(self._waiting)} grammars wait to be compiled, which is the most; ask again later."
                )
            entry = self._entry(digest, params)
            entry.num_holders += 1
        try:
            yield entry.compiled
        finally:
            with self._lock:
                entry.num_holders -= 1
                is_wanted = entry.num_holders or entry.is_asked_for
                is_left = not is_wanted and digest in self._waiting and self._kept[digest] is entry
                if is_left:
                    del self._waiting[digest], self._kept[digest]
                self._drop_unused()
            if is_left:
                entry.compiled.cancel()

    def start(self, params: StructuredOutputsParams | Mapping[str, Any] | None) -> GrammarState | None:
        """Return the start of an output, None without `params`; waits if the grammar is not compiled yet.

        Raises `RequestError`.
        """
        return None if params is None else GrammarState(self.compile(params).result().copy())

    def close(self) -> None:
        """End the threads. Idempotent."""
        with self._lock:
            threads, self._threads = self._threads, None
            left = [self._kept[digest] for digest in self._waiting]
            self._waiting.clear()
            self._kept.clear()
        for entry in left:
            entry.compiled.cancel()
        if threads is not None:
            threads.shutdown(wait=False)

    def _entry(self, digest: str, params: StructuredOutputsParams) -> _Entry:
        """Return the grammar's entry, a new one if there is none; the caller has the lock."""
        entry = self._kept.get(digest)
        if entry is not None:
            self._kept.move_to_end(digest)
            return entry
        entry = self._kept[digest] = _Entry()
        self._waiting[digest] = params
        self._drop_unused()
        if self._num_working < MOST_COMPILED_AT_ONCE:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MOST_COMPILED_AT_ONCE, thread_name_prefix="grammar")
            self._threads.submit(self._work)
            self._num_working += 1
        return entry

    def _drop_unused(self) -> None:
        """Drop the least recently used grammars that nobody holds or waits for; the caller has the lock."""
        num_over = len(self._kept) - MOST_KEPT
        if num_over <= 0:
            return
        unused = (digest for digest, entry in self._kept.items() if not entry.num_holders and entry.compiled.done())
        for digest in list(islice(unused, num_over)):
            del self._kept[digest]

    def _work(self) -> None:
        """Compile what waits, in the order in which it came, until nothing does."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_working -= 1
                    return
                digest, params = self._waiting.popitem(last=False)
                entry = self._kept[digest]
            self._settle(digest, entry, params)

    def _settle(self, digest: str, entry: _Entry, params: StructuredOutputsParams) -> None:
        """Compile one grammar, and give the result or the error to those who wait.

        A grammar that could not be compiled is forgotten, and its error has no traceback: the frames hold what it was
        made of, which may be hundreds of megabytes, and the future that holds the error.
        """
        if not entry.compiled.set_running_or_notify_cancel():  # by a caller of `compile`
            self._forget(digest, entry)
            return
        try:
            matcher = self._compile(params)
        except BaseException as error:  # whatever it is, it is theirs who wait
            self._forget(digest, entry)
            if isinstance(error, RequestError):
                error.__cause__ = error.__context__ = None
                error = error.with_traceback(None)
            entry.compiled.set_exception(error)
        else:
            entry.compiled.set_result(matcher)

    def _forget(self, digest: str, entry: _Entry) -> None:
        with self._lock:
            if self._kept.get(digest) is entry:
                del self._kept[digest]

    def _compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
        return self._backend.compile(params)


class GrammarState:
    """The progress of one request, which follows from its output tokens alone."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self.matcher = matcher
        self._num_accepted = 0
        self._error: str | None = None
        self._mask: tuple[int, Bitmask] | None = None  # the number of tokens before it, and the one row of the mask
        self._mask_error: tuple[int, str] | None = None  # the number of tokens behind which there is none, and why

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the output tokens that have come since the last call. Raises `RequestError` if one is not allowed.

        `token_ids` are all of them. Nothing follows the end of the grammar, so tokens after it are ignored.
        """
        while self._error is None and len(token_ids) > self._num_accepted and not self.matcher.is_stopped():
            self._num_accepted += 1
            self._error = self.matcher.accept(token_ids[self._num_accepted - 1 : self._num_accepted])
        if self._error is not None:
            raise RequestError(f"the output left its grammar: {self._error}")

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens that may come next into a row; computed once for a position.

        If they cannot be computed, all may: `mask_error` says why, and what is drawn is not to be read.
        """
        if self._mask is not None and self._mask[0] == self._num_accepted:
            bitmask[row] = self._mask[1][0]
            return
        error = self.matcher.fill_bitmask(bitmask, row)
        if error is not None:
            bitmask[row] = -1
            self.fail_mask(error)
        self._mask = self._num_accepted, bitmask[row : row + 1].copy()

    def fail_mask(self, error: str) -> None:
        """Say that the next token cannot be constrained, and why."""
        self._mask_error = self._num_accepted, error

    def mask_error(self, num_tokens: int) -> RequestError | None:
        """Return why the token behind so many could not be constrained; None: it was, or is not yet due."""
        if self._mask_error is None or num_tokens < self._mask_error[0]:
            return None
        return RequestError(f"the grammar cannot be followed any further: {self._mask_error[1]}")

    def take_forced(self, token_ids: Sequence[int], most: int, bitmask: Bitmask) -> list[int]:
        """Return the tokens that must come next, because the grammar allows one each time, and take them.

        `token_ids` are all tokens of the output, which must have been taken; nothing is forced otherwise. At most
        `most` tokens are returned. `bitmask`: `[1, num_words]`, overwritten.
        """
        forced: list[int] = []
        while len(forced) < most and self._num_accepted == len(token_ids) + len(forced):
            if self._error is not None or self.matcher.is_stopped():
                break
            self.fill_bitmask(bitmask, 0)
            if self._mask_error is not None:
                break
            words = bitmask.view(np.uint32)[0]
            (places,) = words.nonzero()
            if len(places) != 1 or int(words[places[0]]).bit_count() != 1:
                break
            forced.append(32 * int(places[0]) + int(words[places[0]]).bit_length() - 1)
            self._num_accepted += 1
            self._error = self.matcher.accept(forced[-1:])
        return forced

    @property
    def is_stopped(self) -> bool:
        """Return whether the output is complete, so that nothing may follow."""
        return self._error is None and self.matcher.is_stopped()

    @property
    def end(self) -> int | None:
        """The number of output tokens up to the one that ended the output or left the grammar; None: neither has."""
        return self._num_accepted if self._error is not None or self.is_stopped else None

    def start_over(self) -> None:
        """Forget all tokens; the next `advance` takes them again."""
        self.matcher.reset()
        self._num_accepted, self._error, self._mask, self._mask_error = 0, None, None, None
