"""Suppression of the warnings and progress bars of transformers in favour of our errors and phases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

OnWeights = Callable[[int, int], None]
"""A function called with `(done, total)`, the number of weights read so far and the number of all weights."""

_MIN_INTERVAL_S = 0.1


@contextmanager
def quiet_transformers(on_weights: OnWeights | None = None) -> Iterator[None]:
    """Suppress the output of transformers while the block runs, then restore its settings.

    `on_weights` is called for the steps of every progress bar of this thread, at most ten times a second; while a
    checkpoint loads, the steps are its weights. Blocks of several threads may overlap: the first to begin changes the
    settings, which are the process's, and the last to end restores them.
    """
    _SUPPRESSED.begin()
    before = _ON_WEIGHTS.set(on_weights)
    try:
        yield
    finally:
        _ON_WEIGHTS.reset(before)
        _SUPPRESSED.end()


class _Suppressed:
    """The settings of transformers, which are those of the process, while any thread suppresses its output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._restore: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Change the settings if this is the only block."""
        with self._lock:
            if self._num_blocks == 0:
                self._restore = _suppress()
            self._num_blocks += 1

    def end(self) -> None:
        """Restore the settings if this is the last block."""
        with self._lock:
            self._num_blocks -= 1
            if self._num_blocks == 0:
                self._restore()


_SUPPRESSED = _Suppressed()
_ON_WEIGHTS: ContextVar[OnWeights | None] = ContextVar("piecegraph_on_weights", default=None)


def _suppress() -> Callable[[], None]:
    """Change the settings; return a function that restores them."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    previous_hook = logging.set_tqdm_hook(_count_weights)

    def restore() -> None:
        logging.set_tqdm_hook(previous_hook)
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()

    return restore


def _count_weights(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a progress bar of transformers whose steps are reported to this thread's block."""
    on_weights = _ON_WEIGHTS.get()
    if on_weights is None or not args or not hasattr(args[0], "__len__"):
        return factory(*args, **kwargs)
    return factory(_Counted(args[0], on_weights), **kwargs)


class _Counted:
    """A sized iterable that reports how far it has been read."""

    def __init__(self, items: Iterable[Any], on_weights: OnWeights) -> None:
        self._items = items
        self._on_weights = on_weights

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # the hook asked

    def __iter__(self) -> Iterator[Any]:
        total, reported_at = len(self), 0.0
        for done, item in enumerate(self._items):
            if time.monotonic() - reported_at >= _MIN_INTERVAL_S:
                self._on_weights(done, total)
                reported_at = time.monotonic()
            yield item
        self._on_weights(total, total)
