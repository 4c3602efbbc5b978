"""transformers is quiet inside the block, and as it was after it."""

from __future__ import annotations

import threading

import pytest
from transformers.utils import logging

from piecegraph.runner.models.common.quiet_transformers import quiet_transformers


def settings() -> tuple[int, bool, object]:
    hook = logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(hook)
    return logging.get_verbosity(), logging.is_progress_bar_enabled(), hook


def test_settings_are_restored_even_after_an_error() -> None:
    before = settings()
    with pytest.raises(KeyError), quiet_transformers():
        raise KeyError
    assert settings() == before


def test_a_loading_bar_is_reported_and_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """The last step is always told."""
    told: list[tuple[int, int]] = []
    with quiet_transformers(lambda done, total: told.append((done, total))):
        assert list(logging.tqdm([5, 6, 7], desc="Loading weights")) == [5, 6, 7]
    assert told[0] == (0, 3)
    assert told[-1] == (3, 3)
    assert capsys.readouterr().err == ""


def test_an_iterable_without_length_is_not_counted() -> None:
    with quiet_transformers(lambda done, total: pytest.fail("not a loading bar")):
        assert list(logging.tqdm(iter([1, 2]))) == [1, 2]


def test_blocks_of_two_threads_overlap() -> None:
    """Each is told of its own bars, and whoever ends last restores the settings, in whichever order they end."""
    before = settings()
    told: list[str] = []
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with quiet_transformers(lambda done, total: told.append("other")):
            inside.set()
            over.wait()
            list(logging.tqdm([5]))

    thread = threading.Thread(target=other)
    with quiet_transformers(lambda done, total: told.append("this")):
        thread.start()
        inside.wait()
        list(logging.tqdm([5]))
    assert settings() != before
    list(logging.tqdm([5], disable=True))
    over.set()
    thread.join()
    assert settings() == before
    assert told == ["this", "this", "other", "other"]
