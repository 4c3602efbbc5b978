"""A first product beside other work, where there is a GPU; what is wrong with it is the first step's to say."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from piecegraph.runner.library_ahead import LibraryAhead, multiply

GPU = torch.device("cuda", 0)


def test_it_runs_in_a_thread_until_somebody_waits() -> None:
    may_go_on, threads = threading.Event(), []

    def run(device: torch.device) -> None:
        assert may_go_on.wait(10)
        threads.append((device, threading.current_thread()))

    ahead = LibraryAhead(GPU, run)
    ahead.wait()  # nothing has begun
    ahead.start()
    assert not threads
    may_go_on.set()
    ahead.wait()
    ahead.wait()
    ((device, thread),) = threads
    assert device == GPU and thread is not threading.main_thread()


def test_nothing_runs_where_there_is_no_gpu() -> None:
    def run(device: torch.device) -> None:
        raise AssertionError("it ran")

    ahead = LibraryAhead(torch.device("cpu"), run)
    ahead.start()
    ahead.wait()


def test_what_fails_is_left_to_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    def run(device: torch.device) -> None:
        raise RuntimeError("out of luck")

    caplog.set_level(logging.INFO, "piecegraph")
    ahead = LibraryAhead(GPU, run)
    ahead.start()
    ahead.wait()
    assert "out of luck" in caplog.text


@pytest.mark.gpu
def test_the_product_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the default dtype is meanwhile."""
    torch.set_default_dtype(torch.float16)
    try:
        multiply(GPU)
    finally:
        torch.set_default_dtype(torch.float32)
