"""How connections between processes are made at a start, those of ranks and those of stages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from piecegraph import environment
from piecegraph.errors import ConfigError
from piecegraph.passes.ops.collectives import CollectiveError

START_TIMEOUT_S = 1800.0
"""How long a rank waits at start for the others, which load and compile meanwhile."""


CHECK_S = 0.02
"""How long a rank waits for others at start between two looks at what may have ended them."""


def no_check() -> None:
    """Do nothing: what a rank does between looks at the store unless it watches others."""


def connect_in_thread(connect: Callable[[], None], check: Callable[[], None]) -> None:
    """Call `connect` in a thread, and `check`, which may raise, until it has ended; what it raises leaves the thread.

    The libraries wait for other ranks where nothing can interrupt them. Raises `CollectiveError` where they fail.
    """
    made: Future[None] = Future()

    def make() -> None:
        try:
            connect()
        except BaseException as error:
            made.set_exception(error)
        else:
            made.set_result(None)

    threading.Thread(target=make, name="piecegraph connects ranks", daemon=True).start()
    while not wait([made], CHECK_S).done:
        check()
    try:
        made.result()
    except RuntimeError as error:
        raise CollectiveError(str(error).partition("\n")[0]) from error


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta, *, is_watched: bool) -> Any:
    """Return a process group over NCCL, which makes its communicators at the first collective or transfer.

    `is_watched`: whether somebody notices a lost rank, and aborts the group then; otherwise torch ends this process.
    """
    if not dist.is_nccl_available():
        raise ConfigError("this build of torch has no NCCL, which ranks on GPUs need; give device='cpu'.")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    handling = environment.set_by_default(environment.NCCL_ERRORS, "0") if is_watched else nullcontext()
    with handling:  # torch reads it here
        return nccl(dist.PrefixStore("nccl", store), rank, size, options)
