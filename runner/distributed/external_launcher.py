"""The executor of ranks that a launcher such as torchrun has started, all of which run the same program.

Every rank has a scheduler of its own. Schedules are equal because the program's calls are, and every rank samples the
same tokens from the same logits, so nothing but collectives travels between ranks in a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piecegraph import environment
from piecegraph.errors import ConfigError, UsageError, WorkerError
from piecegraph.runner.common.engine_config import DISTRIBUTED_TIMEOUT_S
from piecegraph.runner.distributed.worker import Worker

if TYPE_CHECKING:
    from piecegraph.progress import OnPhase
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.distributed.protocol import Method
    from piecegraph.runner.startup.loaded import Loaded
    from piecegraph.runner.tensor_parallel.parallel import Parallel

START_COMMAND = (
    "torchrun --nproc-per-node RANKS $(which piecegraph) run --distributed-executor-backend external_launcher"
)


class ExternalLauncherExecutor:
    """One rank of several that a launcher has started; it starts and ends no process itself.

    The launcher's variables say which rank this is: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as
    torchrun sets them. Raises `ConfigError` where they are missing or name another number of ranks than the config.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._verifies_drafts = config.speculative is not None
        self.rank = _number("RANK")
        self.num_ranks = _number("WORLD_SIZE")
        if self.num_ranks != config.tensor_parallel_size:
            raise ConfigError(
                f"the launcher has started {self.num_ranks} ranks, and tensor_parallel_size="
                f"{config.tensor_parallel_size} asks for another number; start as many as it says."
            )
        self._timeout_s = config.distributed_timeout_seconds or DISTRIBUTED_TIMEOUT_S
        self._failure: str | None = None

    @property
    def shows_progress(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def watched(self, on_phase: OnPhase | None) -> OnPhase | None:
        """Return `on_phase` on rank 0, and None on the others; the launcher watches the ranks."""
        return on_phase if self.shows_progress else None

    def while_loading(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that does nothing: the launcher ends this rank when another ends."""
        return contextlib.nullcontext()

    @property
    def is_running(self) -> bool:
        """Return whether the ranks are in step, as far as is known."""
        return self._failure is None

    def parallel(self) -> Parallel | None:
        """Return how this rank takes part in the engine; None: it is the only one."""
        if self.num_ranks == 1:
            return None
        from piecegraph.runner.distributed.group_runner import LaunchedRunner, LaunchedSpeculativeRunner
        from piecegraph.runner.tensor_parallel.parallel import Parallel
        from piecegraph.runner.tensor_parallel.process_group import RankGroup, launched_store

        store = launched_store(self.rank, self.num_ranks)
        group = RankGroup(
            store,
            self.rank,
            self.num_ranks,
            self._timeout_s,
            local_rank=self.rank if environment.read("LOCAL_RANK") is None else _number("LOCAL_RANK"),
        )

        def kind(**parts: Any) -> LaunchedRunner:
            one = LaunchedSpeculativeRunner if self._verifies_drafts else LaunchedRunner
            return one(executor=self, group=group, **parts)

        return Parallel(group=group, runner_kind=kind)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Run a part of a step that all ranks run; if it does not end normally here, no later one can."""
        from piecegraph.passes.ops.collectives import CollectiveError

        if self._failure is not None:
            raise WorkerError(self._failure)
        try:
            yield
        except CollectiveError as error:
            self._failure = (
                f"rank {self.rank} lost the other ranks: {error}. One of them has ended, or does not answer within "
                f"{self._timeout_s:g} s, or runs another program; the launcher says which ended. Start all again."
            )
            raise WorkerError(self._failure) from error
        except BaseException as error:
            self._failure = f"rank {self.rank} left a step ({type(error).__name__}), so the ranks are out of step."
            raise

    def collective_rpc(
        self, loaded: Loaded, method: Method, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call `method` on this rank only, since every rank makes the same call; `timeout` has no effect.

        Raises `UsageError` for a method that all ranks have to answer before any goes on.
        """
        if method == "read_weights":
            raise UsageError(
                "reload_weights is not yet available with distributed_executor_backend='external_launcher', where one "
                "rank may fail to read what others have written; make a new LLM."
            )
        with self.in_step():
            return [Worker(rank=self.rank, num_ranks=self.num_ranks, loaded=loaded).call(method, args, kwargs)]

    def check_idle(self) -> None:
        """Return None: the launcher watches the ranks, and ends this one when another ends."""

    def close(self) -> None:
        """Do nothing: the runner closes the connections, and processes are the launcher's."""


def _number(name: str) -> int:
    """Return a number that the launcher has set. Raises `ConfigError`."""
    text = environment.read(name)
    if text is None or not text.isdecimal():
        found = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(
            f"distributed_executor_backend='external_launcher' is of a program that a launcher starts once for each "
            f"rank, and its variable {name} {found}; use {START_COMMAND} with that backend, or leave the backend out."
        )
    return int(text)
