"""An `LLM` whose ranks are threads of this process: everything of several processes, but for the processes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from piecegraph import LLM
from piecegraph.errors import WorkerError
from piecegraph.runner import llm as llm_module
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.distributed.rank_parallel import rank_parallel
from piecegraph.runner.distributed.worker import Worker, WorkerJob, follow_rank_0
from piecegraph.runner.startup.load_engine import load_engine
from piecegraph.runner.startup.loaded import Loaded

TIMEOUT_S = 120.0
"""A time in which every rank gets a turn, also where many processes share few cores."""


class _Channel:
    """A channel within a process; an exception that is sent is raised."""

    def __init__(self) -> None:
        self._messages: queue.Queue[Any] = queue.Queue()

    def send(self, message: Any) -> None:
        self._messages.put(message)

    def recv(self) -> Any:
        return self._messages.get(timeout=TIMEOUT_S)


class ThreadsExecutor:
    """An executor like `MpExecutor`, of threads."""

    is_running = True
    timeout_s = TIMEOUT_S
    shows_progress = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._store = dist.HashStore()
        self.loaded: dict[int, Loaded] = {}
        self.errors: list[BaseException] = []
        self._channels = {rank: _Channel() for rank in range(1, config.num_ranks)}
        here = threading.current_thread().name
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"{here} rank {rank}", daemon=True)
            for rank in self._channels
        ]

    def parallel(self) -> Any:
        for thread in self._threads:
            thread.start()
        return rank_parallel(self._config, self._store, 0, TIMEOUT_S, leading=self, check=self.check)  # type: ignore[arg-type]

    def watched(self, on_phase: Any) -> Any:
        return on_phase

    def while_loading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check(self) -> None:
        if self.errors:
            raise self.errors[0]

    def send(self, name: str, *args: object) -> None:
        for channel in self._channels.values():
            channel.send((name, *args))

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise WorkerError(f"{error}; other ranks: {self.errors}") from error

    def collective_rpc(self, loaded: Loaded, method: Any, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        """Call `method` here for every rank, which shares this process's memory."""
        ranks = [loaded, *(self.loaded[rank] for rank in sorted(self.loaded))]
        workers = [Worker(rank=rank, num_ranks=len(ranks), loaded=each) for rank, each in enumerate(ranks)]
        return [worker.call(method, args, kwargs) for worker in workers]

    def check_idle(self) -> float:
        self.check()
        return 1.0

    def close(self) -> None:
        self.send("close")
        for thread in self._threads:
            if thread.is_alive():
                thread.join(TIMEOUT_S)

    def _run(self, rank: int) -> None:
        config = replace(self._config, skip_tokenizer_init=True)
        job = WorkerJob(config=config, rank=rank, num_ranks=config.num_ranks, store="", timeout_s=TIMEOUT_S)
        try:
            self.loaded[rank] = load_engine(config, None, rank_parallel(config, self._store, rank, TIMEOUT_S))
            follow_rank_0(self._channels[rank], job, self.loaded[rank])  # type: ignore[arg-type]
        except BaseException as error:
            self.errors.append(error)


@contextlib.contextmanager
def llm_of_threads(folder: Path, **options: Any) -> Iterator[LLM]:
    """An `LLM` over eager pieces, whose ranks above 0 are threads."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "compiler": "eager",
        "max_num_seqs": 8,
        "num_kv_blocks": 48,
        "compile_workers": 0,
    }
    with patch.object(llm_module, "make_executor", ThreadsExecutor):
        made = LLM(folder, **{**arguments, **options})
    with made:
        yield made
