"""Suppression of the warnings and progress bars of transformers in favour of our errors and phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

OnWeights = Callable[[int, int], None]
"""A function called with `(done, total)`, the number of weights read so far and the number of all weights."""

_MIN_INTERVAL_S = 0.1


@contextmanager
def quiet_transformers(on_weights: OnWeights | None = None) -> Iterator[None]:
    """Suppress the output of transformers while the block runs, then restore its settings.

    `on_weights` is called for the steps of every progress bar, at most ten times a second; while a checkpoint loads,
    the steps are its weights.
    """
    from transformers.utils import logging

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if on_weights is None or not args or not hasattr(args[0], "__len__"):
            return factory(*args, **kwargs)
        return factory(_Counted(args[0], on_weights), **kwargs)

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    previous_hook = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous_hook)
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


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
