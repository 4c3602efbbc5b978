"""Executors: who runs the steps of an engine. `uniproc` is this process alone, `mp` has a process for each rank.

Rank 0 is this process, with the scheduler; the others are workers that it starts. One channel leads to each worker.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from piecegraph.compiler.common.private_folder import private_folder
from piecegraph.errors import PiecegraphError, WorkerError
from piecegraph.runner.common.engine_config import DISTRIBUTED_TIMEOUT_S
from piecegraph.runner.distributed.child_process import (
    CAUSE_S,
    Child,
    end_all,
    failure_from,
    how_it_ended,
    pickled,
    start_child,
    wait_for,
)
from piecegraph.runner.distributed.child_program import Failure, RanksLostEachOther
from piecegraph.runner.distributed.loading_watch import LOOK_S, RankLost, ended_by_loss, is_stopped
from piecegraph.runner.distributed.protocol import IDLE_LOOK_S, Method
from piecegraph.runner.distributed.worker import Worker, WorkerJob

if TYPE_CHECKING:
    from piecegraph.progress import OnPhase, Phase
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.startup.loaded import Loaded
    from piecegraph.runner.tensor_parallel.engine_peers import EnginePeers
    from piecegraph.runner.tensor_parallel.parallel import Parallel

WORKER = "piecegraph.runner.distributed.worker"
"""The program of ranks 1 and up."""

CLOSE_S = 3.0
"""How long workers have to end by themselves."""


class UniProcExecutor:
    """The executor of one process on one device."""

    shows_progress = True

    def parallel(self) -> Parallel | None:
        """Return None."""
        return None

    def watched(self, on_phase: OnPhase | None) -> OnPhase | None:
        """Return `on_phase`."""
        return on_phase

    def while_loading(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that does nothing."""
        return contextlib.nullcontext()

    def collective_rpc(
        self, loaded: Loaded, method: Method, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call `method` here; `timeout` is about other processes and has no effect."""
        return [Worker(rank=0, num_ranks=1, loaded=loaded).call(method, args, kwargs)]

    def check_idle(self) -> None:
        """Return None: there is no other rank."""

    def close(self) -> None:
        """Do nothing."""


class MpExecutor:
    """The executor of several processes on this machine, which it starts at once and which load beside this one.

    Raises `WorkerError` from whatever call notices that a worker ended, raised or does not answer; the other workers
    are ended then.
    """

    shows_progress = True

    def __init__(self, config: EngineConfig, peers: EnginePeers | None = None) -> None:
        """Start the ranks. `peers`: the engines that share experts with this one; there may be one rank then."""
        self._config = config
        self._peers = peers
        self._num_ranks = config.num_ranks
        self._timeout_s = config.distributed_timeout_seconds or DISTRIBUTED_TIMEOUT_S
        self._failure: str | None = None
        self._load_ended = threading.Event()  # of `while_loading`
        self._in_use = threading.RLock()  # held by the thread whose call the ranks run
        self._may_answer = False  # whether answers to a call may be in the channels
        self._is_closed = False
        self._processes: list[Child] = []
        self._parallel: Parallel | None = None
        self._refusal: PiecegraphError | None = None  # of the rank that failed first: why it could not load
        lifeline, self._lifeline = os.pipe()
        self._end = weakref.finalize(self, end_all, self._processes, self._lifeline)
        try:
            self._store = self._make_store()
            self._processes += self._start_ranks(lifeline)
            for each in self._processes:
                job = WorkerJob(
                    config=replace(config, skip_tokenizer_init=True),
                    rank=each.number,
                    num_ranks=self._num_ranks,
                    store=self._store,
                    timeout_s=self._timeout_s,
                    peers=peers,
                )
                each.channel.send_bytes(pickled(job, "the arguments of this LLM"))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(lifeline)

    @property
    def is_running(self) -> bool:
        """Return whether all ranks can still be reached, as far as is known."""
        return not self._is_closed and self._failure is None

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of ranks 1 and up."""
        return tuple(each.process.pid for each in self._processes)

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for another in a step, in seconds."""
        return self._timeout_s

    def parallel(self) -> Parallel:
        """Return how rank 0 takes part in the engine."""
        from piecegraph.runner.distributed.rank_parallel import rank_parallel
        from piecegraph.runner.tensor_parallel.process_group import open_store

        store = open_store(self._store, self._num_ranks)
        self._parallel = rank_parallel(
            self._config, store, 0, self._timeout_s, leading=self, check=self.check, peers=self._peers
        )
        return self._parallel

    def watched(self, on_phase: OnPhase | None) -> OnPhase:
        """Return an `on_phase` that first looks at the workers, so that rank 0 does not load for nothing."""

        def watch(phase: Phase) -> None:
            self.check()
            if on_phase is not None:
                on_phase(phase)

        return watch

    @contextlib.contextmanager
    def while_loading(self) -> Iterator[None]:
        """Load inside the block: it ends as soon as a rank ends or fails, in the middle of whatever it does."""
        try:
            stopped_s = max(self._timeout_s - CAUSE_S, self._timeout_s / 2)  # `_fail` waits for a cause
            with ended_by_loss(self._processes, self._abort, stopped_s) as self._load_ended:
                yield
        except RankLost:
            failure = self._fail(None)
            raise self._refusal or failure from None
        except WorkerError:
            if self._refusal is not None:
                raise self._refusal from None
            raise
        except RuntimeError as error:
            from piecegraph.passes.ops.collectives import CollectiveError

            if isinstance(error, CollectiveError):
                raise self._fail(error) from error
            raise

    def _abort(self, is_over: Callable[[], bool]) -> None:
        """End the collectives in which a GPU of this process waits for ranks that are gone, until the load is over."""
        if self._parallel is not None and self._parallel.group.is_on_gpu:
            self._parallel.abort(is_over)

    def check(self) -> None:
        """Raise `WorkerError` if a worker has ended or, unless it may be the answer to a call, has said anything."""
        if any(each.process.poll() is not None or self._has_spoken(each) for each in self._processes):
            raise self._fail(None)

    def _has_spoken(self, worker: Child) -> bool:
        return not self._may_answer and worker.channel.poll()

    def send(self, name: str, *args: object) -> None:
        """Send a call to every worker, without waiting for it."""
        message = pickle.dumps((name, *args), pickle.HIGHEST_PROTOCOL)
        for each in self._processes:
            each.channel.send_bytes(message)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Run a part of a step on all ranks; if it does not end normally, end the workers and say why."""
        with self._in_use:
            self._refuse_ended()
            try:
                yield
            except Exception as error:
                raise self._fail(error) from error
            except BaseException:  # an interrupt: the ranks are out of step
                self._failure = "a step was interrupted, so the ranks were ended; make a new LLM."
                self._end()
                raise

    def collective_rpc(
        self, loaded: Loaded, method: Method, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call `method` on every rank. `timeout` in seconds: how long the other ranks may take; None: any time.

        A rank that ends meanwhile, or that a signal has stopped for the timeout of collectives, ends the call; in the
        main thread also while it runs on rank 0.

        Raises `UsageError` if the call cannot be sent to another process, and `WorkerError` if a rank raises.
        """
        message = pickled(("call", method, args, kwargs), "the call")
        with self.in_step():
            for each in self._processes:
                each.channel.send_bytes(message)
            before, self._may_answer = self._may_answer, True
            try:
                with ended_by_loss(self._processes, self._abort, may_answer=True):
                    results = [Worker(rank=0, num_ranks=self._num_ranks, loaded=loaded).call(method, args, kwargs)]
            except RankLost:
                raise self._fail(None) from None
            finally:
                self._may_answer = before
            deadline = None if timeout is None else time.monotonic() + timeout
            results.extend(self._answer(each, deadline) for each in self._processes)
        return results

    def check_idle(self) -> float:
        """Look at the workers, unless another thread is in a call, which notices a lost one by itself."""
        if self._in_use.acquire(blocking=False):
            try:
                self._refuse_ended()
                self.check()
            finally:
                self._in_use.release()
        return IDLE_LOOK_S

    def close(self) -> None:
        """End all workers, and wait for their end. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._failure is None:
            for each in self._processes:
                with contextlib.suppress(OSError):
                    each.channel.send(("close",))
            wait_for(self._processes, CLOSE_S)
        self._end()

    def _refuse_ended(self) -> None:
        """Raise `WorkerError` if the workers were ended."""
        if not self.is_running:
            raise WorkerError(self._failure or "this LLM is closed; make a new one.")

    def _make_store(self) -> str:
        """Return the address of a new store at which the ranks meet."""
        return str(private_folder("ranks") / "store")

    def _start_ranks(self, lifeline: int) -> list[Child]:
        """Start ranks 1 and up."""
        children: list[Child] = []
        try:
            for rank in range(1, self._num_ranks):
                children.append(start_child(WORKER, "rank", rank, lifeline, self._timeout_s))
        except BaseException:
            self._processes += children  # `close` ends them
            raise
        return children

    def _answer(self, worker: Child, deadline: float | None) -> Any:
        """Wait for the answer to a call. Raises OSError or EOFError for a rank that does not answer, or has ended."""
        stopped_since: float | None = None
        while not wait([worker.channel], LOOK_S if deadline is None else min(LOOK_S, _left(deadline))):
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"rank {worker.number} did not answer in time")
            if any(each.process.poll() is not None for each in self._processes):
                raise EOFError("another rank has ended")
            stopped_since = (stopped_since or now) if is_stopped(worker) else None
            if stopped_since is not None and now - stopped_since > self._timeout_s:
                raise TimeoutError(f"rank {worker.number} was stopped by a signal")
        name, value = worker.channel.recv()
        if name in ("failed", "ended"):
            raise WorkerError(how_it_ended(worker, value))
        return value

    def _fail(self, error: BaseException | None) -> WorkerError:
        """End all workers and return the error that says which of them is the cause; the first call decides."""
        self._load_ended.set()  # no second error while the cause of the first one is looked for
        if self._failure is not None:
            self._end()
            return WorkerError(self._failure)
        if isinstance(error, WorkerError):
            self._failure = str(error)
        else:
            cause = self._cause(error)
            ended = "The other ranks were ended; make a new LLM."
            self._failure = f"the ranks lost each other: {error}. {ended}" if cause is None else f"{cause} {ended}"
            if cause is None:
                self._end()
                return RanksLostEachOther(self._failure)
        self._end()
        return WorkerError(self._failure)

    def _cause(self, error: BaseException | None) -> str | None:
        """Return which rank failed first and how; workers have a moment to say so. None: each only lost the others."""
        if error is not None:
            from piecegraph.passes.ops.collectives import CollectiveError

            if not isinstance(error, (CollectiveError, OSError, EOFError)):
                return f"rank 0 raised {type(error).__name__}: {error}."
        failures: dict[int, str] = {}
        consequences: set[int] = set()
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline and len(failures) + len(consequences) < len(self._processes):
            for each in self._processes:
                if each.number in failures or each.number in consequences:
                    continue
                found = failure_from(each)
                if isinstance(found, Failure) and found.is_consequence:
                    consequences.add(each.number)
                elif found is not None:
                    failures[each.number] = how_it_ended(each, found)
                    self._refusal = found.refusal if isinstance(found, Failure) else None
            if failures:
                break
            time.sleep(0.02)
        if failures:
            return min(failures.items())[1]
        silent = [str(each.number) for each in self._processes if each.number not in consequences]
        if silent:
            why = "" if error is None else f" ({error})"
            return f"rank {', '.join(silent)} did not answer within {self._timeout_s:g} s{why}."
        return None


def _left(deadline: float) -> float:
    """Return the seconds until `deadline`, 0 once it is over."""
    return max(deadline - time.monotonic(), 0.0)
