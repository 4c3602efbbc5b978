"""The program of a process that is one rank of an engine, and not rank 0: it loads, then does what rank 0 does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from piecegraph.paused_gc import paused_gc
from piecegraph.runner.distributed.child_process import pickled
from piecegraph.runner.distributed.child_program import run_child

if TYPE_CHECKING:
    from pathlib import Path

    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.distributed.protocol import Executor
    from piecegraph.runner.lora.base_weights import BaseRows
    from piecegraph.runner.startup.loaded import Loaded
    from piecegraph.runner.startup.reload_weights import RankWeights
    from piecegraph.runner.tensor_parallel.engine_peers import EnginePeers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """A job holds what a worker is told once, at start."""

    config: EngineConfig
    rank: int
    num_ranks: int
    store: str  # the address of the store that ranks meet at, for `open_store`
    timeout_s: float
    peers: EnginePeers | None = None  # the engines that share experts with this rank's; None: there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One rank, as functions that `collective_rpc` calls see it."""

    rank: int
    num_ranks: int
    loaded: Loaded

    def report(self) -> dict[str, Any]:
        """Return what the rank holds: bytes of weights, bytes read of files, heads and layers of attention, and pieces.

        `compiled_pieces`: how many of its unique pieces this rank has not found in the cache.
        """
        model = self.loaded.model
        plan = model.rank_plan
        compiled = self.loaded.compiled.report()
        keys = [row.key for row in compiled.unique_pieces]
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "weight_bytes": sum({id(each): each.nbytes for each in model.model.parameters()}.values()),
            "bytes_read": model.bytes_read,
            "q_heads": None if plan is None or plan.heads is None else plan.heads.q_heads,
            "kv_heads": None if plan is None or plan.heads is None else plan.heads.kv_heads,
            "experts": None if plan is None else plan.num_experts,
            "layers": None if model.stage is None else (model.stage.layers.start, model.stage.layers.stop),
            "cache": compiled.cache.state,
            "unique_pieces": keys,
            "compiled_pieces": 0 if compiled.cache.state == "hit" else len(keys) - compiled.cache.loaded_pieces,
        }

    def read_weights(self, weights: str | Path | None) -> RankWeights:
        """Read the rank's part of other weights, and return what became of it; see `reload_on_ranks`."""
        from piecegraph.runner.startup.reload_weights import RankWeights, read_rank_weights

        error, digest = read_rank_weights(self.loaded, weights)
        return RankWeights(rank=self.rank, pid=os.getpid(), error=error, digest=digest)

    def write_weights(self, is_wanted: bool) -> list[str]:
        """Write what `read_weights` has read, or drop it; return the names of the tensors that were written."""
        from piecegraph.runner.startup.reload_weights import write_rank_weights

        return write_rank_weights(self.loaded, is_wanted)

    def release_memory(self, level: int) -> int:
        """Give back memory of this rank, which is on a CPU, and return how many bytes; see `Sleep`."""
        from piecegraph.runner.sleeping.sleep import release_on_cpu

        return release_on_cpu(self.loaded, level)

    def base_rows(self, path: str) -> list[BaseRows]:
        """Return rows of a module that adapters may change, if this rank has it; see `compare_on_all_stages`."""
        from piecegraph.runner.lora.base_weights import base_rows

        return base_rows(self.loaded.engine.adapters.modules, path)

    def call(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a method of this class, or a function of the worker, returns."""
        from piecegraph.passes.ops.collectives import running_in
        from piecegraph.runner.distributed.group_runner import GroupRunner

        function = getattr(self, method) if isinstance(method, str) else lambda *a, **k: method(self, *a, **k)
        runner = self.loaded.runner
        if not isinstance(runner, GroupRunner):
            return function(*args, **kwargs)
        with running_in(runner.group):
            return function(*args, **kwargs)


def compare_on_all_stages(executor: Executor, loaded: Loaded) -> None:
    """Have rank 0 compare the model's weights in an adapter's files with those of the stage that has the module."""
    if loaded.model.stage is None or loaded.model.adapted is None:
        return

    def bases(path: str) -> list[BaseRows]:
        found: list[list[BaseRows]] = executor.collective_rpc(loaded, "base_rows", None, (path,), {})
        return [each for of_rank in found for each in of_rank]

    loaded.engine.adapters.bases = bases


def main() -> None:
    """Serve rank 0 until it says that all is over, or ends."""
    run_child("rank", serve_rank)


def serve_rank(channel: Connection, rank: int) -> None:
    """Load what the first message says, then do what rank 0 says until it closes."""
    job = channel.recv()
    follow_rank_0(channel, job, _load(job))


def _load(job: WorkerJob) -> Loaded:
    with paused_gc():
        from piecegraph.runner.distributed.rank_parallel import rank_parallel
        from piecegraph.runner.startup.load_engine import load_engine
        from piecegraph.runner.tensor_parallel.process_group import open_store

        store = open_store(job.store, job.num_ranks)
        parallel = rank_parallel(job.config, store, job.rank, job.timeout_s, peers=job.peers)
        return load_engine(job.config, None, parallel)


def follow_rank_0(channel: Connection, job: WorkerJob, loaded: Loaded) -> None:
    """Do what rank 0 says on `channel`, in that order, until it says that all is over. Raises EOFError at its end."""
    from piecegraph.runner.distributed.group_runner import GroupRunner
    from piecegraph.runner.distributed.lockstep_runner import LockstepRunner
    from piecegraph.runner.scheduling.scheduler_output import ScheduledDecodes

    runner = loaded.runner
    assert isinstance(runner, GroupRunner), runner
    worker = Worker(rank=job.rank, num_ranks=job.num_ranks, loaded=loaded)
    if isinstance(runner, LockstepRunner):
        runner.hear(channel)
    last_ids: tuple[str, ...] = ()
    while True:
        name, *args = channel.recv()
        if name == "execute":
            output, at_most = args
            if isinstance(output.scheduled, ScheduledDecodes):
                if output.scheduled.request_ids == last_ids:
                    output.scheduled.request_ids = last_ids  # the runner knows a batch by identity
                last_ids = output.scheduled.request_ids
            runner.execute_model(output, at_most=at_most)
        elif name == "sample":
            runner.follow(*args)
        elif name == "idle":
            assert isinstance(runner, LockstepRunner), runner
            runner.run_idle()
        elif name == "reset":
            runner.reset()
        elif name == "call":
            answer = ("result", worker.call(*args))
            channel.send_bytes(pickled(answer, "what the call returns"))  # `send` would share tensors' memory
        else:
            assert name == "close", name
            runner.close()
            loaded.compiled.close()
            return


if __name__ == "__main__":
    # Pickles name classes of this module by its full name, so this runs as an imported module too.
    from piecegraph.runner.distributed import worker

    worker.main()
