"""`BackgroundCompile`, the compile of a model's pieces that goes on while the model runs their graphs."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.building.ready import ReadyModel
from piecegraph.compiler.common.piece_errors import shortened
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.piece_compilers.compile_static import CompiledStatic
from piecegraph.compiler.piece_compilers.protocol import CompiledPiece, RunPiece

if TYPE_CHECKING:
    from piecegraph.compiler.building.build import BuildResult
    from piecegraph.compiler.building.inductor_pieces import InductorPieceCompiler

logger = logging.getLogger(__name__)

Finish = Callable[[ReadyModel], CompileReport]
"""Stores a compiled model in the cache, and returns its report with what became of that."""


class CompileEnded(Exception):
    """The signal that the model is closed, so that the thread ends."""


@dataclass(slots=True)
class _Job:
    """Work on the device that must not run beside the model."""

    run: Callable[[], object]
    done: threading.Event
    error: BaseException | None = None


class BackgroundCompile:
    """The compile of a model's pieces, in other processes, while the model runs their graphs.

    A thread of this object waits for the processes and loads what they have compiled. The model itself changes only in
    `swap`, which the owner of the model calls between two calls of it, always in the same thread. Until `begin`, which
    is not called where the cache has the model, there is nothing to do.
    """

    def __init__(self) -> None:
        self.num_pieces = 0
        """The number of pieces to compile, static ones included."""
        self.num_swapped = 0
        """The number of pieces that the model runs compiled."""
        self.failure: BaseException | None = None
        """Why the compile has ended without a result; the model goes on with what it has."""
        self._ready: ReadyModel | None = None
        self._compiler: InductorPieceCompiler | None = None
        self._arrived: queue.SimpleQueue[tuple[int, CompiledPiece] | BuildResult | _Job | BaseException] = (
            queue.SimpleQueue()
        )
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Return whether `swap` has nothing more to do, now or later."""
        return self._thread is None or self._is_finished

    @property
    def is_waited_for(self) -> bool:
        """Return whether `swap` has something to do now."""
        return not self._arrived.empty()

    def begin(
        self,
        ready: ReadyModel,
        compiler: InductorPieceCompiler,
        finish: Finish,
        flight: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Compile the pieces of `ready`, which runs their graphs, with `compiler`, which is closed at the end.

        `finish` stores the result. The thread works inside `flight()`, in which other processes wait for the result.
        """
        assembly = ready.built.assembly
        assert assembly is not None and self._thread is None, "the model was built to be compiled later, once"
        self._ready, self._compiler = ready, compiler
        self.num_pieces = len(assembly.unique) + len(assembly.static)
        self._thread = threading.Thread(
            target=self._run, args=(ready, compiler, finish, flight), name="piecegraph compile", daemon=True
        )
        self._thread.start()

    def swap(self, *, most: int | None = None) -> int:
        """Make the model run what has been compiled since the last call, and return how many pieces that were.

        At most `most` results are taken. Raises nothing: a failure is logged, and is in `failure`. The model must not
        be running.
        """
        taken = before = 0
        assert self._ready is not None, "there is nothing to swap before `begin`"
        before = self.num_swapped
        while (most is None or taken < most) and not self._is_finished:
            try:
                arrived = self._arrived.get_nowait()
            except queue.Empty:
                break
            taken += 1
            if isinstance(arrived, _Job):
                self._do(arrived)
            elif isinstance(arrived, BaseException):
                self._is_finished, self.failure = True, arrived
                logger.warning(
                    "pieces run as their graphs, because the compile in the background has ended: %s", arrived
                )
            elif isinstance(arrived, tuple):
                index, piece = arrived
                self._ready.put_piece(index, piece, is_watched=piece.fallback is not None and not self._is_strict)
                self.num_swapped += 1
            else:
                self._ready.adopt(arrived)
                self.num_swapped, self._is_finished = self.num_pieces, True
        return self.num_swapped - before

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `swap` has something to do or everything is done; return False after `timeout_s`.

        For callers that do not run the model meanwhile.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_finished and not self.is_waited_for:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._closed.wait(0.02)
        return True

    def close(self) -> None:
        """End the compile and its processes, whatever they do, and wait for the thread's end. Idempotent."""
        self._closed.set()
        if self._compiler is not None:
            self._compiler.interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        while not self._arrived.empty():
            self._arrived.get_nowait()
        self._ready = self._compiler = None
        self._is_finished = True

    def sleep(self, seconds: float) -> None:
        """Sleep in the thread of this object. Raises `CompileEnded` once it is closed."""
        if self._closed.wait(seconds):
            raise CompileEnded

    @property
    def _is_strict(self) -> bool:
        assert self._ready is not None and self._ready.built.assembly is not None
        return self._ready.built.assembly.config.strict

    def _run(
        self,
        ready: ReadyModel,
        compiler: InductorPieceCompiler,
        finish: Finish,
        flight: Callable[[], AbstractContextManager[object]],
    ) -> None:
        try:
            with torch.no_grad(), flight():
                built = self._compile(ready, compiler)
                report = finish(ReadyModel(ready.interface, built, ready.weights))
            self._arrived.put(replace(built, report=report))
        except BaseException as error:  # whatever it is, the model goes on, and its owner is told
            if not self._closed.is_set():
                self._arrived.put(error)
        finally:
            compiler.close()

    def _compile(self, ready: ReadyModel, compiler: InductorPieceCompiler) -> BuildResult:
        assembly = ready.built.assembly
        assert assembly is not None, "checked by `begin`"
        begin = time.perf_counter()
        pieces: dict[int, CompiledPiece] = {}
        for index, piece in compiler.compile_each(assembly.unique, assembly.post_grad):
            self._refuse_closed()
            pieces[index] = piece
            self._arrived.put((index, piece))
        seconds = time.perf_counter() - begin
        static: CompiledStatic = assembly.compile_static(_TunedBetweenCalls(compiler, self._between_calls), _ignore)
        self._refuse_closed()
        compiled = tuple(pieces[index] for index in range(len(assembly.unique)))
        return assembly.result(compiler, compiled, static, seconds, _ignore)

    def _between_calls(self, run: Callable[[], object]) -> None:
        """Have `swap` call `run`, and wait for it. Raises what `run` raises."""
        job = _Job(run, threading.Event())
        self._arrived.put(job)
        while not job.done.wait(0.05):
            self._refuse_closed()
        if job.error is not None:
            raise job.error

    def _do(self, job: _Job) -> None:
        try:
            job.run()
        except Exception as error:
            job.error = error
        finally:
            job.done.set()

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise CompileEnded


class _TunedBetweenCalls:
    """A piece compiler whose first runs of static pieces happen between two calls of the model."""

    def __init__(self, compiler: InductorPieceCompiler, between_calls: Callable[[Callable[[], object]], None]) -> None:
        self._compiler = compiler
        self._between_calls = between_calls
        self.name = compiler.name
        self.compile, self.compile_static = compiler.compile, compiler.compile_static
        self.start, self.save_pending, self.close = compiler.start, compiler.save_pending, compiler.close

    @property
    def can_save(self) -> bool:
        return self._compiler.can_save

    def tune(self, run: RunPiece, inputs: Sequence[Any]) -> None:
        """Run a static piece for the first time, while nothing else runs on the device."""
        self._between_calls(lambda: self._compiler.tune(run, inputs))


def _ignore(phase: object) -> None:
    """Take a phase of the compile, which nobody watches."""


def describe(error: BaseException) -> str:
    """Return an error of a background compile in a line."""
    return shortened(f"{type(error).__name__}: {error}")
