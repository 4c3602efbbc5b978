"""The processes of several engines, as the front door sees them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from piecegraph import environment
from piecegraph.compiler.common.private_folder import private_folder
from piecegraph.errors import WorkerError
from piecegraph.progress import OnPhase
from piecegraph.runner.common.engine_config import DISTRIBUTED_TIMEOUT_S
from piecegraph.runner.distributed.child_process import (
    Child,
    end_all,
    how_it_ended,
    pickled,
    start_child,
    wait_for,
)
from piecegraph.runner.distributed.executor import CLOSE_S
from piecegraph.runner.distributed.protocol import IDLE_LOOK_S

if TYPE_CHECKING:
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.data_parallel.engine_program import EngineFacts, StepNews
    from piecegraph.runner.distributed.child_program import Failure
    from piecegraph.runner.distributed.protocol import Method
    from piecegraph.runner.startup.loaded import Loaded
    from piecegraph.runner.tensor_parallel.engine_peers import EnginePeers
    from piecegraph.runner.tensor_parallel.parallel import Parallel

PROGRAM = "piecegraph.runner.data_parallel.engine_program"
"""The program of an engine."""

LOOK_S = 0.5
"""How often a wait looks whether an engine has gone silent."""

CAUSE_OF_LOSS_S = 5.0
"""How long the other engines have, after one has lost them, to say why."""

_ENDED = "ended"

_LOST = frozenset({_ENDED, "failed"})
"""The messages that say that an engine is lost."""


@dataclass(slots=True)
class Inbox:
    """Messages of all engines in the order in which threads have read them.

    A message is read at `first` and stays until `drop`, so an interrupt between the two loses none.
    """

    arrived: deque[tuple[int, int, str, Any]] = field(default_factory=deque)  # number, engine, name, value
    news: threading.Event = field(default_factory=threading.Event)
    num_arrived: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    last_seen: dict[int, float] = field(default_factory=dict)  # engine -> monotonic

    def put(self, engine: int, name: str, value: Any) -> None:
        """Add a message; called by the threads that read."""
        self.last_seen[engine] = time.monotonic()
        if name == "alive":
            return
        with self.lock:
            self.num_arrived += 1
            self.arrived.append((self.num_arrived, engine, name, value))
        self.news.set()


class EngineProcesses:
    """Several engines, each in a process of its own, which load at the same time from construction on.

    Raises `WorkerError` from whatever call notices that an engine ended, raised or does not answer; the others are
    ended then. Messages are written and read by threads, so that an interrupt leaves no message half written. It has
    the methods of `Executor`, over the ranks of all engines.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.num_engines = config.data_parallel_size
        self._timeout_s = config.distributed_timeout_seconds or DISTRIBUTED_TIMEOUT_S
        self._failure: str | None = None
        self._is_closed = False
        self._children: list[Child] = []
        self._outboxes: list[queue.SimpleQueue[bytes | None]] = []
        self._inbox = Inbox()
        self._questions = itertools.count()
        self._threads: list[threading.Thread] = []
        lifeline, self._lifeline = os.pipe()
        self._end = weakref.finalize(self, _end_engines, self._children, self._threads, self._outboxes, self._lifeline)
        self.in_lockstep = config.shares_experts
        """Return whether all engines run each step together, because they share experts."""
        store = str(private_folder("engines") / "store") if self.in_lockstep else None
        try:
            for number in range(self.num_engines):
                gpus = gpus_of_engine(config, number)
                child = start_child(PROGRAM, "engine", number, lifeline, self._timeout_s, gpus)
                self._children.append(child)
                child.channel.send_bytes(pickled(_job(config, number, store), "the arguments of this LLM"))
                self._start_threads(child)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(lifeline)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the engines."""
        return tuple(each.process.pid for each in self._children)

    def parallel(self) -> Parallel | None:
        """Return None: this process runs no step."""
        return None

    def while_loading(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that does nothing: `wait_until_ready` notices an engine's end."""
        return contextlib.nullcontext()

    def wait_until_ready(self, on_phase: OnPhase | None) -> list[EngineFacts]:
        """Return the facts of all engines once they can take requests; the first one's phases go to `on_phase`.

        Raises what an engine has refused to load with, and `WorkerError` if one ends.
        """
        facts: dict[int, EngineFacts] = {}
        while len(facts) < self.num_engines:
            _, engine, name, value = self._first()
            if name == "ready":
                facts[engine] = value
            elif name == "phase":
                if on_phase is not None:
                    on_phase(value)
            else:
                assert name == "refused", name
                self._failure = f"engine {engine} could not be loaded: {value}"
                self._end()
                raise value
            self.drop_news()
        return [facts[engine] for engine in range(self.num_engines)]

    def send(self, engine: int, name: str, *values: object) -> None:
        """Send a message without waiting for anything. Raises `UsageError` for what cannot be sent."""
        self._refuse_failed()
        self._outboxes[engine].put(pickled((name, *values), "the request" if name == "add" else "the call"))

    def next_news(self, busy: Sequence[int]) -> tuple[int, int, StepNews]:
        """Wait for the next news of a step, and return their number and their engine with them.

        They stay the next ones until `drop_news`. `busy`: the engines that have requests, which have to give a sign of
        life now and then.
        """
        while True:
            number, engine, name, value = self._first(busy)
            if name == "news":
                return number, engine, value
            assert name == "result", name
            self.drop_news()  # the answer to a question whose caller was interrupted

    def has_news(self) -> bool:
        """Return whether any message waits."""
        return bool(self._inbox.arrived)

    def drop_news(self) -> None:
        """Remove the message that came first."""
        with self._inbox.lock:  # another thread may look for an engine that is lost
            self._inbox.arrived.popleft()

    def ask(
        self,
        engines: Sequence[int],
        take_news: Callable[[], None],
        name: str,
        *values: object,
        timeout: float | None = None,
    ) -> list[Any]:
        """Send a message that engines answer, and return the answers; `take_news` takes news that come before.

        Raises `TimeoutError` after `timeout` seconds.
        """
        question = next(self._questions)
        for engine in engines:
            self.send(engine, name, question, *values)
        deadline = None if timeout is None else time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while len(answers) < len(engines):
            _, engine, kind, value = self._first(engines, deadline)
            if kind != "result":
                take_news()
                continue
            if value[0] == question:
                answers[engine] = value[1]
            self.drop_news()
        return [answers[engine] for engine in engines]

    def collective_rpc(
        self, loaded: Loaded, method: Method, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Refuse: the front door makes the calls, because it takes the news that come meanwhile."""
        raise AssertionError("FrontDoor.collective_rpc calls the ranks of engines")

    def check_idle(self) -> float:
        """Look whether an engine has ended, or has lost a rank, while none has requests; see `Executor.check_idle`."""
        self._refuse_failed()
        with self._inbox.lock:
            lost = next((each for each in self._inbox.arrived if each[2] in _LOST), None)
        if lost is not None:
            raise self._fail(*cause_of(self._inbox, lost[1], lost[3]))
        return IDLE_LOOK_S

    def close(self) -> None:
        """End all engines, and wait for their end. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._failure is None:
            for outbox in self._outboxes:
                outbox.put(pickle.dumps(("close",)))
            wait_for(self._children, CLOSE_S)
        self._end()

    def _start_threads(self, child: Child) -> None:
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outboxes.append(outbox)
        self._inbox.last_seen[child.number] = time.monotonic()
        for target, arguments in (
            (_read, (child.channel, child.number, self._inbox)),
            (_write, (child.channel, outbox)),
        ):
            thread = threading.Thread(target=target, args=arguments, name=f"piecegraph {child.name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _first(self, busy: Sequence[int] = (), deadline: float | None = None) -> tuple[int, int, str, Any]:
        """Wait for a message and return it without removing it. Raises `WorkerError` if an engine has failed."""
        self._refuse_failed()
        inbox = self._inbox
        silent = dict.fromkeys(busy, (0.0, 0.0))  # when it was last seen, and how long this has waited since
        while True:
            inbox.news.clear()
            if inbox.arrived:
                found = inbox.arrived[0]
                if found[2] in _LOST:
                    raise self._fail(*cause_of(inbox, found[1], found[3]))
                return found
            before = time.monotonic()
            inbox.news.wait(LOOK_S)
            now = time.monotonic()
            for engine, (seen, waited) in silent.items():
                if inbox.last_seen[engine] != seen:
                    silent[engine] = inbox.last_seen[engine], 0.0
                    continue
                waited += min(now - before, LOOK_S)  # not more: this process may have been stopped
                silent[engine] = seen, waited
                if waited > self._timeout_s and not inbox.arrived:
                    raise self._fail_with(f"engine {engine} did not answer within {self._timeout_s:g} s.")
            if deadline is not None and now > deadline and not inbox.arrived:
                raise TimeoutError("an engine did not answer in time")

    def _fail(self, engine: int, found: Failure | None) -> WorkerError:
        """End all engines and return the error that says how one of them has ended."""
        child = self._children[engine]
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(CLOSE_S)
        code = child.process.poll()
        return self._fail_with(how_it_ended(child, found if found is not None else -1 if code is None else code))

    def _fail_with(self, reason: str) -> WorkerError:
        self._failure = f"{reason} The other engines were ended; make a new LLM."
        self._end()
        return WorkerError(self._failure)

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise WorkerError(self._failure)
        if self._is_closed:
            raise WorkerError("the engines of this LLM are closed; make a new one.")


def cause_of(inbox: Inbox, engine: int, found: Failure | None) -> tuple[int, Failure | None]:
    """Return which engine failed first and how.

    `found` is what `engine` said, None if it ended without a word. Where it only lost the others, they have a moment to
    say why.
    """
    deadline = time.monotonic() + CAUSE_OF_LOSS_S
    while found is not None and found.is_consequence and time.monotonic() < deadline:
        inbox.news.clear()
        ends: dict[int, Failure | None] = {}
        with inbox.lock:
            for _, other, name, value in inbox.arrived:
                if name in _LOST:
                    ends.setdefault(other, value)  # what it said, if anything, comes before its end
        for other, end in ends.items():
            if end is None or not end.is_consequence:
                return other, end
        inbox.news.wait(LOOK_S)
    return engine, found


def gpus_of_engine(config: EngineConfig, number: int) -> dict[str, str]:
    """Return the change of an engine's environment that shows it its GPUs alone: as many as it has ranks.

    Engines that share experts see the GPUs of all, since they write each other's memory.
    """
    if str(config.device).partition(":")[0] == "cpu":
        return {}
    if config.shares_experts:
        return environment.gpus_of(0, config.data_parallel_size * config.num_ranks)
    return environment.gpus_of(number * config.num_ranks, config.num_ranks)


def _job(config: EngineConfig, number: int, store: str | None) -> tuple[EngineConfig, EnginePeers | None]:
    """Return what an engine is told once, at start. `store`: where engines that share experts meet."""
    if store is None:
        return replace(config, data_parallel_size=1, start="full"), None
    from piecegraph.runner.tensor_parallel.engine_peers import EnginePeers

    peers = EnginePeers(engine=number, num_engines=config.data_parallel_size, store=store)
    return replace(config, start="full"), peers


def _end_engines(
    children: Sequence[Child],
    threads: Sequence[threading.Thread],
    outboxes: Sequence[queue.SimpleQueue[bytes | None]],
    lifeline: int,
) -> None:
    """Kill the engines that still run, wait for their end and for the threads, then close the channels."""
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
    for outbox in outboxes:
        outbox.put(None)
    for thread in threads:
        thread.join(CLOSE_S)  # the other ends of their channels are gone
    end_all(children, lifeline)


def _read(channel: Connection, engine: int, inbox: Inbox) -> None:
    """Move messages from a channel to `inbox` until the channel ends."""
    while True:
        try:
            name, *values = channel.recv()
        except (EOFError, OSError):
            inbox.put(engine, _ENDED, None)
            return
        inbox.put(engine, name, values[0] if values else None)


def _write(channel: Connection, outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Write messages until None comes; what an engine that has ended does not take is lost."""
    while True:
        message = outbox.get()
        if message is None:
            return
        with contextlib.suppress(OSError):
            channel.send_bytes(message)
