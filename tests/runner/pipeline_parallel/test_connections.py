from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from piecegraph.errors import ConfigError
from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.pipeline_parallel.connections import connect_in_thread, nccl_group, no_check


def test_a_connection_that_fails_says_so_in_one_line() -> None:
    def connect() -> None:
        raise RuntimeError("no route\nto the host")

    with pytest.raises(CollectiveError, match=r"^no route$"):
        connect_in_thread(connect, no_check)


def test_what_a_check_raises_ends_the_wait() -> None:
    """The connection itself may go on for as long as it likes."""
    ends = threading.Event()

    def connect() -> None:
        ends.wait()

    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect_in_thread(connect, check)
    ends.set()


def test_a_build_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="this build of torch has no NCCL"):
        nccl_group(dist.HashStore(), 0, 2, timedelta(seconds=1), is_watched=True)


@pytest.mark.parametrize(("is_watched", "own", "expected"), [(True, "", "0"), (True, "1", "1"), (False, "", None)])
def test_torch_does_not_end_a_process_whose_ranks_are_watched(
    is_watched: bool, own: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so otherwise, and where the variable that it reads is set."""

    class Group:
        Options = SimpleNamespace

        def __init__(self, *arguments: object) -> None:
            self.handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    if own:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", own)
    group = nccl_group(dist.HashStore(), 0, 2, timedelta(seconds=1), is_watched=is_watched)
    assert group.handling == expected
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == (own or None)
