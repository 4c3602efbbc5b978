"""The compiled grammars of an engine, and the progress of its requests through them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from piecegraph.errors import RequestError
from piecegraph.runner.structured_output.params import StructuredOutputsParams, as_structured_outputs
from piecegraph.runner.structured_output.protocol import Bitmask, GrammarMatcher, StructuredOutputBackend

MOST_KEPT = 256
"""Compiled grammars that are kept; the least recently used are dropped."""

MOST_COMPILED_AT_ONCE = 2
"""Threads that compile, made when the first grammar is asked for."""


class Grammars:
    """Grammars by a hash of their parameters, compiled by threads of their own. May be called by any thread.

    The backend is made by the first of these threads, because reading a vocabulary takes a second.
    """

    def __init__(self, make_backend: Callable[[], StructuredOutputBackend]) -> None:
        self._make_backend = make_backend
        self._backend: StructuredOutputBackend | None = None
        self._backend_lock = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[GrammarMatcher]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, params: StructuredOutputsParams | Mapping[str, Any]) -> Future[GrammarMatcher]:
        """Return the grammar's compiled form as a future, which raises `RequestError` for what cannot be compiled.

        Its matcher is shared: `copy` it.
        """
        params = as_structured_outputs(params)
        digest = params.digest()
        with self._lock:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
                return found
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MOST_COMPILED_AT_ONCE, thread_name_prefix="grammar")
            future = self._kept[digest] = self._threads.submit(self._compile, params)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        future.add_done_callback(lambda done: self._forget_failed(digest, done))
        return future

    def start(self, params: StructuredOutputsParams | Mapping[str, Any] | None) -> GrammarState | None:
        """Return the start of an output, None without `params`; waits if the grammar is not compiled yet.

        Raises `RequestError`.
        """
        return None if params is None else GrammarState(self.compile(params).result().copy())

    def close(self) -> None:
        """End the threads. Idempotent."""
        with self._lock:
            threads, self._threads = self._threads, None
            self._kept.clear()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
        return self._backend.compile(params)

    def _forget_failed(self, digest: str, done: Future[GrammarMatcher]) -> None:
        """Drop a grammar that could not be compiled: its error has a traceback, which holds what it was made of."""
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                if self._kept.get(digest) is done:
                    del self._kept[digest]


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
