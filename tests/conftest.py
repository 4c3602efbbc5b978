"""What holds for every test."""

from __future__ import annotations

import os
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Tests have a cache of their own, kept from run to run, and of what is compiled pieces alone: most are about what
    a trace comes to.

    A background job of a shell starts with Ctrl-C ignored, and so would every process that tests start: those that
    are about it need it.
    """
    kept = config.rootpath / ".pytest_cache" / "piecegraph"
    os.environ.setdefault("PIECEGRAPH_CACHE", "pieces")
    os.environ.setdefault("PIECEGRAPH_CACHE_DIR", str(kept / "cache"))
    os.environ["XDG_DATA_HOME"] = str(kept / "data")  # where the key lies that signs
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no GPU. torch is imported only if there are such tests."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no NVIDIA GPU"))
