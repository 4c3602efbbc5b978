"""Engines of `data_parallel_size`, and their ranks, as threads: everything of several engines but processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from piecegraph import LLM
from piecegraph.runner.clusters import make_executor as make_executor_module
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.data_parallel import engine_processes, engine_program
from piecegraph.runner.distributed.child_process import Child
from piecegraph.runner.distributed.child_program import failure_of
from piecegraph.runner.distributed.executor import UniProcExecutor
from tests.runner.pipeline_parallel.stages_in_threads import TIMEOUT_S, ThreadsExecutor


class _EngineThread:
    """What a `Child` needs of its process."""

    pid = os.getpid()

    def __init__(self, channel: Connection, number: int) -> None:
        self._channel, self._number = channel, number
        self._thread = threading.Thread(target=self._serve, name=f"engine {number}", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("an engine in a thread", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """Do nothing: a thread ends by itself."""

    def _serve(self) -> None:
        try:
            engine_program._serve(self._channel, self._number)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._channel.send(("failed", failure_of(error)))
        finally:
            self._channel.close()


def _start_thread(module: str, role: str, number: int, *others: object) -> Child:
    ours, theirs = Pipe()
    return Child(role, number, _EngineThread(theirs, number), ours)


def _make_executor(config: EngineConfig, peers: object = None) -> UniProcExecutor | ThreadsExecutor:
    assert peers is None, "engines that share experts need processes"
    return UniProcExecutor() if config.num_ranks == 1 else ThreadsExecutor(config)


@contextlib.contextmanager
def engines_are_threads() -> Iterator[None]:
    """Have an `LLM` that is made inside the block run its engines in threads."""
    with (
        patch.object(engine_processes, "start_child", _start_thread),
        patch.object(make_executor_module, "make_executor", _make_executor),
    ):
        yield


@contextlib.contextmanager
def llm_of_engines(folder: Path, size: int, **options: Any) -> Iterator[LLM]:
    """An `LLM` over eager pieces in front of `size` engines."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "compiler": "eager",
        "max_num_seqs": 4,
        "num_kv_blocks": 32,
        "distributed_timeout_seconds": TIMEOUT_S,
    }
    with engines_are_threads():
        made = LLM(folder, data_parallel_size=size, **{**arguments, **options})
    with made:
        yield made
