"""Triton's digest is there after the block, and nothing is asked of a Triton that is not used."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from triton.runtime import cache

from piecegraph.compiler.triton_digest import found_beside


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that asked Triton for its digest."""
    threads: list[int] = []

    @functools.lru_cache
    def triton_key() -> str:
        threads.append(threading.get_ident())
        return "digest"

    assert callable(cache.triton_key), "this Triton keeps its digest elsewhere"
    monkeypatch.setattr(cache, "triton_key", triton_key)
    return threads


def test_it_is_found_by_another_thread_while_the_block_runs(asked: list[int]) -> None:
    with found_beside(torch.device("cuda")):
        pass
    assert len(asked) == 1 and asked[0] != threading.get_ident()
    assert cache.triton_key() == "digest" and len(asked) == 1


def test_a_cpu_needs_none(asked: list[int]) -> None:
    with found_beside(torch.device("cpu")):
        pass
    assert asked == []


def test_an_error_of_the_block_is_its_own(asked: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), found_beside(torch.device("cuda")):
        _ = 1 // 0
    assert len(asked) == 1


def test_a_triton_that_cannot_say_is_asked_again_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose files are unreadable, and one that keeps its digest elsewhere: loading goes on."""
    asked = []

    def fails() -> str:
        asked.append("triton_key")
        raise OSError("a file of Triton's is gone")

    monkeypatch.setattr(cache, "triton_key", fails)
    for _ in range(2):
        with found_beside(torch.device("cuda")):
            asked.append("the block")
        monkeypatch.delattr(cache, "triton_key", raising=False)
    assert sorted(asked) == ["the block", "the block", "triton_key"]
