"""The thread that steps an engine, and the streams in which an asyncio server gets its outputs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from piecegraph.errors import PiecegraphError, UsageError, WorkerError
from piecegraph.tools.serve.engine.steps import StepOutput, Steps

if TYPE_CHECKING:
    import torch

_Request = TypeVar("_Request")
_Output = TypeVar("_Output", bound=StepOutput)
_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

FAILURES_BEFORE_THE_NEWEST_ENDS = 3
"""Steps in a row that may raise before the newest request ends with an error; each is computed again by the next."""

FAILURES_BEFORE_ALL_END = 4
"""Steps in a row that may raise before every request that they ran ends with an error."""


IN_USE_WAIT_S = 0.01
"""Seconds after which a step is tried again that was refused because another thread uses the engine."""


class EngineStopped(PiecegraphError):
    """The engine has stopped, because the server ends or because its steps fail."""


class StepsFailed(PiecegraphError):
    """A request has ended because the steps in which it ran have failed."""


class WaitedTooLong(PiecegraphError):
    """A request has waited in the queue for longer than a request may."""


@dataclass(slots=True, eq=False)
class OutputStream(Generic[_Output]):
    """The outputs of one prompt on their way to a coroutine of `loop`."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    _arrived: asyncio.Queue[_Output | BaseException] = field(default_factory=asyncio.Queue)
    is_finished: bool = False  # the engine has forgotten the request

    def put(self, item: _Output | BaseException) -> None:
        """Add an output, or the error that ends the stream; called in the loop's thread."""
        self.is_finished = isinstance(item, BaseException) or item.finished
        self._arrived.put_nowait(item)

    async def get(self) -> _Output:
        """Wait for the next output and return it. Raises the error that has ended the stream."""
        item = await self._arrived.get()
        if isinstance(item, BaseException):
            raise item
        return item


class _Add(NamedTuple):
    stream: OutputStream[Any]
    request: Any


class _Abort(NamedTuple):
    stream: OutputStream[Any]


class _Call(NamedTuple):
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]  # of `loop`

    def run(self) -> None:
        """Call the function, and give its result or its error to who waits."""
        try:
            result = self.function()
        except Exception as error:
            self.settle(error=error)
        else:
            self.settle(result)

    def settle(self, result: Any = None, *, error: BaseException | None = None) -> None:
        """End the wait with a result or an error, unless nobody waits any more."""

        def put() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop is closed
            logger.debug("the result of a call has no reader any more")


class _Stop(NamedTuple):
    pass


class _Waiting(NamedTuple):
    deadline: float  # monotonic
    request_id: str


class EngineThread(Generic[_Request, _Output]):
    """The owner of an engine while a server runs: no other thread calls the engine's methods.

    Requests and their ends come through a queue, which is read before every step, so a request that is aborted takes
    part in no further step. The outputs of a step go to the event loop in one call.

    No request ends the thread: what the engine raises for a request is raised by the stream of that request. A step
    that raises is computed again. If it keeps raising, the newest request ends, which has probably caused it, then all
    of them, and only an engine whose steps fail for other requests, too, is given up.

    A program may call the engine nevertheless, to put it to sleep for instance: requests are refused meanwhile, and a
    step that is refused is tried again.
    """

    def __init__(
        self,
        steps: Steps[_Request, _Output],
        *,
        device: torch.device,
        max_wait_s: float | None = None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Store the parts; `start` starts the thread.

        `max_wait_s`: the longest time until a request is first scheduled. `on_failure` is called in the thread when
        the engine is given up.
        """
        self._engine = steps
        self._device = device
        self._max_wait_s = max_wait_s
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[_Add | _Abort | _Call | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream[_Output]] = {}  # unfinished, by request id
        self._waiting: deque[_Waiting] = deque()  # in order of their deadlines
        self._is_stopping = False
        self._num_failed_steps = 0
        self._suspects: list[OutputStream[_Output]] = []  # what the first failed step has run
        self._lock = threading.Lock()  # over `_is_over` and additions to the queue
        self._is_over = False
        self._end_reason = "the engine has stopped."  # what is said once it is over
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Return whether requests are still served."""
        return self._thread.is_alive() and not self._is_over

    @property
    def end_reason(self) -> str:
        """Why requests are served no more, in a sentence, once `is_alive` is False."""
        return self._end_reason

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request_id: str, request: _Request) -> OutputStream[_Output]:
        """Queue a checked request and return the stream of its outputs; called by a coroutine.

        What the engine raises nevertheless, for a `request_id` that is in use or because it sleeps, the stream raises.
        """
        stream: OutputStream[_Output] = OutputStream(request_id, asyncio.get_running_loop())
        with self._lock:
            if self._is_over or not self._thread.is_alive():
                raise EngineStopped(self._end_reason)
            self._commands.put(_Add(stream, request))
        return stream

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` in the engine's thread, between two steps, and return what it returns.

        Raises what it raises, and `EngineStopped` if the engine has stopped.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, loop, loop.create_future())
        with self._lock:
            if self._is_over or not self._thread.is_alive():
                raise EngineStopped(self._end_reason)
            self._commands.put(call)
        result: _Result = await call.future
        return result

    def abort(self, stream: OutputStream[_Output]) -> None:
        """End a request before the next step, unless it is finished. Its stream gets nothing more. Idempotent."""
        if not stream.is_finished:
            stream.is_finished = True
            self._commands.put(_Abort(stream))

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the step that runs; unfinished requests end with `EngineStopped`. Idempotent.

        Returns whether the thread has ended within `timeout_s`.
        """
        self._commands.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException = EngineStopped("the server is shutting down.")
        try:
            if self._device.type == "cuda":
                import torch

                torch.cuda.set_device(self._device)
            while self._take_commands():
                if self._engine.has_unfinished:
                    self._step()
        except BaseException as failure:  # whatever it is, the callers are told and the process ends
            logger.exception("the engine has failed")
            error = EngineStopped(f"the engine has failed: {_named(failure)}")
            self._on_failure(failure)
        finally:
            with self._lock:
                self._is_over, self._end_reason = True, str(error)
            self._end_all(error)

    def _take_commands(self) -> bool:
        """Apply the commands that have come; without a request, wait for one. Returns False once asked to stop."""
        while True:
            may_wait = not self._engine.has_unfinished and not self._is_stopping
            try:
                command = self._next_command() if may_wait else self._commands.get(block=False)
            except queue.Empty:
                return not self._is_stopping
            if isinstance(command, _Stop):
                self._is_stopping = True
            elif isinstance(command, _Abort):
                self._abort(command.stream)
            elif isinstance(command, _Call):
                command.run()
            else:
                self._add(command)

    def _next_command(self) -> _Add | _Abort | _Call | _Stop:
        """Wait for a command; until it comes, do what the engine has to do in idle moments."""
        while True:
            if not self._commands.empty():
                return self._commands.get()
            wait_s = self._engine.use_idle_moment()
            with suppress(queue.Empty):
                return self._commands.get(block=wait_s != 0.0, timeout=wait_s)

    def _add(self, add: _Add) -> None:
        stream = add.stream
        try:
            self._engine.add(stream.request_id, add.request)
        except Exception as error:  # of any kind: it ends this request, and not the thread
            self._deliver([(stream, error)])
            return
        self._streams[stream.request_id] = stream
        if self._max_wait_s is not None:
            self._waiting.append(_Waiting(time.monotonic() + self._max_wait_s, stream.request_id))

    def _abort(self, stream: OutputStream[_Output]) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._abort_quietly(stream)

    def _abort_quietly(self, stream: OutputStream[_Output]) -> None:
        """Have the engine forget a request. If that raises, the request runs on without a reader."""
        try:
            self._engine.abort(stream.request_id)
        except Exception as error:
            logger.error("request %r could not be aborted", stream.request_id, exc_info=error)

    def _step(self) -> None:
        if self._waiting:
            self._end_waits()
        try:
            outputs = self._engine.step()
        except UsageError as error:  # of the engine's state: another thread of the program uses it
            logger.debug("the engine is in use by another thread", exc_info=error)
            time.sleep(IN_USE_WAIT_S)
            return
        except Exception as error:
            if _is_fatal(error) or not self._streams:  # without one, no request can have caused it
                raise
            logger.error("a step has failed and is computed again", exc_info=error)
            self._after_a_failure()
            return
        self._num_failed_steps = 0
        if not outputs:
            return
        delivered: list[tuple[OutputStream[_Output], _Output | BaseException]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted
            if output.finished:
                del self._streams[output.request_id]
            delivered.append((stream, output))
        self._deliver(delivered)

    def _after_a_failure(self) -> None:
        """Count a step that has raised, and end requests that may have caused it: those that it ran, the newest first.

        Requests that came after the first failure, or that no step has run, have caused none of it.
        """
        self._num_failed_steps += 1
        everyone = list(self._streams.values())
        if self._num_failed_steps == 1:
            self._suspects = [each for each in everyone if not self._engine.is_waiting(each.request_id)]
        suspects = [each for each in self._suspects if self._streams.get(each.request_id) is each] or everyone
        if self._num_failed_steps == FAILURES_BEFORE_THE_NEWEST_ENDS:
            self._end_failed(suspects[-1:])
        elif self._num_failed_steps == FAILURES_BEFORE_ALL_END:
            self._end_failed(suspects)
        if self._num_failed_steps == FAILURES_BEFORE_ALL_END or not self._streams:
            self._num_failed_steps = 0  # those that are left, or come, start anew

    def _end_failed(self, streams: list[OutputStream[_Output]]) -> None:
        """End requests because steps keep failing."""
        for stream in streams:
            self._abort(stream)
        error = StepsFailed(f"{self._num_failed_steps} steps in a row have failed, so the request was ended.")
        self._deliver([(stream, error) for stream in streams])

    def _end_waits(self) -> None:
        """End the requests that no step has run before their deadlines."""
        now = time.monotonic()
        while self._waiting and self._waiting[0].deadline <= now:
            _, request_id = self._waiting.popleft()
            stream = self._streams.get(request_id)
            if stream is None or not self._engine.is_waiting(request_id):
                continue
            self._abort(stream)
            message = f"the request has waited for {self._max_wait_s:g} s and was not run; try again later."
            self._deliver([(stream, WaitedTooLong(message))])

    def _end_all(self, error: BaseException) -> None:
        """End every request with `error`, those that are still in the queue included."""
        ended = list(self._streams.values())
        self._streams.clear()
        while True:
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                break
            if isinstance(command, _Add):
                ended.append(command.stream)
            elif isinstance(command, _Call):
                command.settle(error=error)
        self._deliver([(stream, error) for stream in ended])
        for stream in ended:
            self._abort_quietly(stream)

    @staticmethod
    def _deliver(items: list[tuple[OutputStream[_Output], _Output | BaseException]]) -> None:
        if not items:
            return

        def put() -> None:
            for stream, item in items:
                if not stream.is_finished:
                    stream.put(item)

        try:
            items[0][0].loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("%d outputs have no reader any more", len(items))


def _named(failure: BaseException) -> str:
    """Return what callers are told of a failure: its class, and how a rank has ended; the rest is in the log."""
    name = type(failure).__name__
    return f"{name}: {failure}" if isinstance(failure, WorkerError) else f"{name}."


def _is_fatal(error: Exception) -> bool:
    """Return whether no step can succeed after `error`: a rank or the device is lost."""
    import torch

    return isinstance(error, WorkerError | torch.AcceleratorError)
