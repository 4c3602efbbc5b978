"""The Inductor piece compiler: each unique piece through `standalone_compile`, in processes of its own.

A child process compiles one piece at a time and writes the artifact to a file; this process loads it. The own caches of
Inductor and Triton lie in private folders of this process. Only piecegraph's cache keeps compiled pieces, and a piece
that is there is loaded. A piece that only this process can compile is compiled here, and its note says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from piecegraph.cache.store.keys import key_of
from piecegraph.cache.store.single_flight import Flights, OnWait
from piecegraph.compiler.building.piece_tasks import PieceFailure, PieceTask, as_texts, is_plain_data, job_of
from piecegraph.compiler.common.piece_errors import (
    eager_note,
    eager_reason,
    is_repeatable_failure,
    piece_failed,
    shortened,
)
from piecegraph.compiler.common.private_folder import private_folder, scratch_folder
from piecegraph.compiler.inductor.artifact import artifact_bytes
from piecegraph.compiler.inductor.caches import inductor_cache_dir
from piecegraph.compiler.inductor.compile import asks_dynamo_to_trace_again, generated_kernels, standalone_compile
from piecegraph.compiler.inductor.cpp_libraries import cpp_libraries
from piecegraph.compiler.inductor.custom_pass import POST_GRAD_OPTION
from piecegraph.compiler.inductor.files import LoadedPiece, PieceFiles, load_files
from piecegraph.compiler.inductor.options import (
    NOTHING_MEASURED,
    inductor_option_names,
    is_tuned_at_compile_time,
    no_compile_workers,
    unknown_inductor_options,
)
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
from piecegraph.compiler.piece_compilers.compile_static import needs_tuning
from piecegraph.compiler.piece_compilers.protocol import NO_PASSES, CompiledPiece, Fallback, OnPiece, RunPiece
from piecegraph.compiler.piece_compilers.static_piece import StaticPiece
from piecegraph.compiler.rewriting.post_grad import PostGrad, PostGradRun
from piecegraph.compiler.splitting.passthrough import NOTE, SHARES_MEMORY, build_graph_runner, needs_no_codegen
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.piece_format import (
    NotExpressible,
    dump_piece,
    load_piece,
)
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.store.piece_store import PieceFacts, PieceStore, device_of_piece, piece_factors
from piecegraph.compiler.torch_compat.versions import first_run_tuning_options
from piecegraph.compiler.workers.pool import CompileFailure, CompilePool, CompileResult
from piecegraph.compiler.workers.prestart import early_processes
from piecegraph.compiler.workers.process import num_workers
from piecegraph.errors import ConfigError, KeyFactorError, did_you_mean
from piecegraph.passes.matching.pass_data import NotData

logger = logging.getLogger(__name__)

BACKGROUND_NICENESS = 5
"""How much lower the priority of processes is that compile while the model runs."""


class InductorPieceCompiler:
    """A piece compiler that uses Inductor in `workers` child processes (None: `num_workers`; 0 or 1: in this process).

    A piece on which Inductor fails runs as its graph; under `strict` that is an error. `options` are Inductor's;
    `static_options` are added to them for static pieces of sizes up to `static_options_up_to`. `is_in_background`:
    another thread runs the model meanwhile, so at least one child process compiles, and child processes have a lower
    priority.
    """

    name = "inductor"

    def __init__(
        self,
        options: Mapping[str, Any],
        workers: int | None,
        static_options: Mapping[str, Any] | None = None,
        static_options_up_to: int = 2**31,
        cache: CompileCache | None = None,
        on_wait: OnWait | None = None,
        *,
        strict: bool = False,
        is_in_background: bool = False,
    ) -> None:
        self._is_in_background = is_in_background
        self.options = dict(options)
        self.static_options_up_to = static_options_up_to
        self.static_options = dict(static_options or {})
        self.workers = num_workers(workers)
        early = early_processes()
        folders = None if early is None else early.folders()
        self._inductor, self._triton = folders or (private_folder("inductor"), private_folder("triton"))
        self._pool: CompilePool | None = None
        self._cache = cache
        self._strict = strict
        self._store = PieceStore(cache, self._triton) if cache is not None and cache.store is not None else None
        self._on_wait = on_wait
        self._flights: Flights | None = None  # made when there is something to compile
        self._pending: list[_PendingSave] = []  # pieces that are saved after tuning
        self._not_saved: list[str] = []  # why compiled pieces were not saved

    def start(self) -> None:
        """Start worker processes, unless some have started early, so that their imports overlap with tracing."""
        if (self.workers > 1 or self._is_in_background) and self._pool is None and is_plain_data(self.options):
            early = early_processes()
            started = [] if early is None else early.take()
            try:
                niceness = BACKGROUND_NICENESS if self._is_in_background else 0
                self._pool = CompilePool(max(self.workers, 1), self._inductor, self._triton, started, niceness)
            except BaseException:
                for process in started:
                    process.end()
                raise

    def compile(
        self,
        pieces: Sequence[UniquePiece],
        on_piece: OnPiece,
        post_grad: PostGrad = NO_PASSES,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[CompiledPiece, ...]:
        """Compile each piece, or load it from the cache, as `PieceCompiler.compile` describes.

        Raises `ConfigError` for options that Inductor does not have.
        """
        self.prepare(pieces, post_grad)
        compiled: dict[int, CompiledPiece] = {}
        for index, piece in self.compile_each(pieces, post_grad, meanwhile=meanwhile):
            compiled[index] = piece
            on_piece(len(compiled))
        return tuple(compiled[index] for index in range(len(pieces)))

    def prepare(self, pieces: Sequence[UniquePiece], post_grad: PostGrad) -> None:
        """Check the options, and load our own kernels for `pieces`. Raises `ConfigError`."""
        if post_grad.passes and POST_GRAD_OPTION in {**self.options, **self.static_options}:
            raise ConfigError(
                f"inductor_options has {POST_GRAD_OPTION!r}, which {post_grad.passes[0].name!r} needs; "
                "give that pass as a GraphPass too (docs/writing_a_pass.md)."
            )
        for field, options in (("inductor_options", self.options), ("compile_sizes_options", self.static_options)):
            unknown = unknown_inductor_options(options)
            if unknown:
                hint = did_you_mean(unknown[0], inductor_option_names())
                raise ConfigError(f"{field} has {unknown[0]!r}, which is not a field of torch._inductor.config.{hint}")
        if self._cache is not None and pieces:
            OWN_KERNELS.begin_without_plan(self._cache, pieces, device_of_piece(pieces[0]))

    def compile_each(
        self,
        pieces: Sequence[UniquePiece],
        post_grad: PostGrad = NO_PASSES,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Iterator[tuple[int, CompiledPiece]]:
        """Yield the number and the result of each piece as soon as it is known, after `prepare`.

        Raises what `compile` raises, and `CompileInterrupted` after `interrupt`.
        """
        options = {**NOTHING_MEASURED, **self.options}
        tasks = [PieceTask(piece, options) for piece in pieces]
        for index, outcome in self._compile_all(tasks, post_grad, meanwhile=meanwhile):
            if isinstance(outcome, PieceFailure):
                failed = pieces[index]
                name = f"unique piece {failed.index}"
                if self._strict:
                    raise piece_failed(name, failed.num_nodes, outcome.reason) from outcome.cause
                yield index, self._eagerly(tasks[index], outcome.reason)
            else:
                yield index, outcome

    def compile_static(
        self, pieces: Sequence[StaticPiece], on_piece: OnPiece, post_grad: PostGrad = NO_PASSES
    ) -> tuple[CompiledPiece | str, ...]:
        """Compile static pieces side by side; `tune` measures kernels later.

        Where `static_options` ask for measurements while compiling (max_autotune), pieces compile one at a time.
        """
        plain = {**first_run_tuning_options(), **self.options}
        tuned = {**plain, **self.static_options}
        tasks = [
            PieceTask(static.piece, tuned if static.size <= self.static_options_up_to else plain, static)
            for static in pieces
        ]
        at_once = 1 if any(is_tuned_at_compile_time(task.options) for task in tasks) else None
        outcomes: dict[int, CompiledPiece | str] = {}
        for index, outcome in self._compile_all(tasks, post_grad, at_once=at_once):
            outcomes[index] = shortened(outcome.reason) if isinstance(outcome, PieceFailure) else outcome
            on_piece(len(outcomes))
        return tuple(outcomes[index] for index in range(len(pieces)))

    def tune(self, run: RunPiece, inputs: Sequence[Any]) -> None:
        """Run a static piece on `inputs`, which measures its kernels, and save it."""
        folders = inductor_cache_dir(self._inductor, self._triton)
        with folders, no_compile_workers(), torch.no_grad():
            run(*inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        for each in [each for each in self._pending if each.run is run]:
            self._pending.remove(each)
            self._save(each)

    @property
    def can_save(self) -> bool:
        """Return True if there is a store to save pieces in."""
        return self._store is not None

    def save_pending(self) -> tuple[str, ...]:
        """Save pieces that are not saved yet, and kernels; return the distinct reasons why a piece was not saved."""
        pending, self._pending = self._pending, []
        for each in pending:
            self._save(each)
        reasons, self._not_saved = self._not_saved, []
        OWN_KERNELS.save()
        return tuple(dict.fromkeys(reasons))

    def interrupt(self) -> None:
        """End the child processes, so that a compile in another thread ends with `CompileInterrupted`. Idempotent."""
        if self._pool is not None:
            self._pool.close()

    def close(self) -> None:
        """Release all claims and end the child processes. Idempotent."""
        if self._flights is not None:
            self._flights.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _compile_all(
        self,
        tasks: Sequence[PieceTask],
        post_grad: PostGrad,
        *,
        at_once: int | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Iterator[tuple[int, CompiledPiece | PieceFailure]]:
        """Yield the number and the result of each task as soon as it is known.

        Pieces that another process compiles come last: this process waits for them and loads them, or compiles them
        itself if the other process stored nothing.
        """
        for task in tasks:
            task.factors = self._factors(task, post_grad)
        to_do = list(range(len(tasks)))
        while to_do:
            to_compile, elsewhere = [], []
            for index in to_do:
                task = tasks[index]
                done = self._without_compiling(task, post_grad)
                if done is None and not self._claim(task):
                    elsewhere.append(index)
                    continue
                if done is None and self._was_stored_since(task):
                    done = self._from_cache(task)
                if done is None:
                    to_compile.append(index)
                else:
                    self._release_claim(task)
                    yield index, done
            for index, outcome in self._compile_tasks(tasks, to_compile, post_grad, at_once, meanwhile):
                if isinstance(outcome, PieceFailure):
                    self._release_claim(tasks[index])
                yield index, outcome
            if elsewhere:
                meanwhile()
                self._wait(tasks[elsewhere[0]])
            to_do = elsewhere

    def _without_compiling(self, task: PieceTask, post_grad: PostGrad) -> CompiledPiece | None:
        """Return the piece from the cache, or as its graph if it needs no code; None if it must be compiled."""
        loaded = self._from_cache(task)
        if loaded is not None:
            return loaded
        if task.static is None and task.piece.shares_memory:
            return self._as_graph(task, SHARES_MEMORY)
        is_plain = task.static is None and not post_grad.passes and not self.options
        return self._as_graph(task, NOTE) if is_plain and needs_no_codegen(task.piece.graph_module) else None

    def _claim(self, task: PieceTask) -> bool:
        """Claim the task for this process; return False if another process is compiling the same piece."""
        if self._cache is None or task.factors is None:
            return True
        if self._flights is None:
            self._flights = self._cache.flights(self._on_wait)
        return self._flights is None or self._flights.take(key_of(task.factors))

    def _was_stored_since(self, task: PieceTask) -> bool:
        """Return whether another process stored the piece between the lookup and the claim."""
        return self._cache is not None and task.factors is not None and self._cache.has(key_of(task.factors))

    def _wait(self, task: PieceTask) -> None:
        """Wait until another process has compiled the piece, or the wait is given up."""
        assert self._flights is not None and task.factors is not None, "only a piece with a key is compiled elsewhere"
        self._flights.wait(key_of(task.factors))

    def _release_claim(self, task: PieceTask) -> None:
        """Release the claim, so that other processes stop waiting."""
        if self._flights is not None and task.factors is not None:
            self._flights.release(key_of(task.factors))

    def _compile_tasks(
        self,
        tasks: Sequence[PieceTask],
        to_compile: Sequence[int],
        post_grad: PostGrad,
        at_once: int | None,
        meanwhile: Callable[[], object],
    ) -> Iterator[tuple[int, CompiledPiece | PieceFailure]]:
        """Compile the tasks whose numbers are in `to_compile`; yield each number with its result."""
        if not to_compile:
            return
        texts, notes = as_texts({index: tasks[index] for index in to_compile})
        try:
            passes = post_grad.as_data()
        except NotData as reason:
            passes = {}
            notes = {index: note or f"compiled in this process: {reason}" for index, note in notes.items()}
        elsewhere = [index for index in to_compile if not notes[index]] if self._pool is not None else []
        with scratch_folder() as folder:
            if self._pool is not None and elsewhere:
                jobs = [job_of(index, tasks[index], texts[index], folder, passes) for index in elsewhere]
                self._pool.submit(jobs, at_once=at_once)
                meanwhile()
            for index in to_compile:
                if index not in elsewhere:
                    yield index, self._compile_here(tasks[index], texts.get(index), notes[index], post_grad)
            if self._pool is not None and elsewhere:
                for result in self._pool.results():
                    index = result.job.index
                    if isinstance(result, CompileFailure) and result.needs_parent:
                        note = f"compiled in this process: {result.reason}"
                        yield index, self._compile_here(tasks[index], texts[index], note, post_grad)
                    elif isinstance(result, CompileFailure):
                        yield index, PieceFailure(result.reason)
                    else:
                        yield index, self._loaded(tasks[index], result, texts[index])

    def _factors(self, task: PieceTask, post_grad: PostGrad) -> dict[str, Any] | None:
        """Return the factors of the task's key; None if there is no cache or no key can be made."""
        if self._store is None:
            return None
        size = task.static.size if task.static is not None else None
        try:
            factors = piece_factors(task.piece, size, task.options, post_grad)
            key_of(factors)
        except KeyFactorError:
            return None
        return factors

    def _from_cache(self, task: PieceTask) -> CompiledPiece | None:
        if self._store is None or task.factors is None:
            return None
        key = key_of(task.factors)
        found = self._store.load(key)
        if found is None:
            return None
        facts = found.facts
        if facts.eager_reason and self._strict:
            return None  # the compile will fail as it did, and that is an error
        return CompiledPiece(
            run=found.run,
            seconds=found.seconds,
            kernels=facts.kernels,
            note=facts.note,
            post_grad=facts.post_grad,
            key=key,
            is_loaded=True,
            eager_reason=facts.eager_reason,
            fallback=found.fallback,
        )

    def _eagerly(self, task: PieceTask, reason: str) -> CompiledPiece:
        """Return a piece on which Inductor failed, as its graph. It is saved if Inductor would fail on it again."""
        why = eager_reason(reason)
        logger.warning(
            "unique piece %d (%d nodes) runs eagerly: %s (strict=True makes this an error)",
            task.piece.index,
            task.piece.num_nodes,
            why,
        )
        return self._as_graph(task, eager_note(why), why, may_pass=not is_repeatable_failure(reason))

    def _as_graph(self, task: PieceTask, note: str, eager_reason: str = "", *, may_pass: bool = False) -> CompiledPiece:
        """Return the piece as its graph. With `may_pass` the reason is temporary, and the piece is not saved."""
        begin = time.perf_counter()
        try:
            text: str | None = dump_piece(task.piece.graph_module)
        except NotExpressible:
            text = None
        done = LoadedPiece.of_graph(task.piece.graph_module)
        seconds = time.perf_counter() - begin
        facts = task.facts(None if eager_reason else 0, note, (), text, seconds, eager_reason)
        keeps = done if text is not None and not may_pass else None
        return self._done(task, done.run, facts, keeps, seconds)

    def _compile_here(
        self, task: PieceTask, text: str | None, note: str, post_grad: PostGrad
    ) -> CompiledPiece | PieceFailure:
        if text is None and task.static is not None:
            return PieceFailure(f"it cannot be made static: {note}")
        begin = time.perf_counter()
        kernels = generated_kernels()
        passes = PostGradRun(post_grad)
        try:
            if text is not None:
                graph_module, examples = load_piece(text, task.sizes)
            else:
                graph_module, examples = task.piece.graph_module, task.piece.examples
            options = {**task.options, **passes.options()}
            folders = inductor_cache_dir(self._inductor, self._triton)
            with folders, cpp_libraries({}) as libraries:
                run: Any = standalone_compile(graph_module, examples, options)
        except Exception as error:
            if asks_dynamo_to_trace_again(error):
                raise
            return PieceFailure(f"{type(error).__name__}: {error}", error)
        kernels = generated_kernels() - kernels
        seconds = time.perf_counter() - begin
        artifact = artifact_bytes(run)
        done = None
        if artifact is not None:
            done = LoadedPiece(run, self._inductor, self._triton, _piece_files(artifact, libraries))
        facts = task.facts(kernels, note, tuple(passes.outcomes), text, seconds)
        return self._done(task, run, facts, done, seconds)

    def _loaded(self, task: PieceTask, result: CompileResult, text: str) -> CompiledPiece | PieceFailure:
        begin = time.perf_counter()
        try:
            done = load_files(_piece_files(result.job.artifact.read_bytes(), result.libraries), self._triton)
        except Exception as error:
            return PieceFailure(f"loading its artifact: {type(error).__name__}: {error}", error)
        facts = task.facts(result.kernels, "", result.post_grad, text, result.seconds)
        return self._done(task, done.run, facts, done, result.seconds + time.perf_counter() - begin)

    def _done(
        self, task: PieceTask, run: RunPiece, facts: PieceFacts, done: LoadedPiece | None, seconds: float
    ) -> CompiledPiece:
        """Return the compiled piece, and save it if possible.

        It is saved at once, so that it survives if this process is killed; a piece that needs tuning is saved after it.
        """
        key = None
        adapted = facts.adapted(run)
        is_compiled = facts.note not in (NOTE, SHARES_MEMORY) and not facts.eager_reason
        if task.factors is None:
            why = "a piece could not be stored: its options or its passes hold values that are not plain data"
        elif done is None:
            lacking = "its graph is not plain data" if facts.graph_data is None else "torch cannot save it"
            why = f"a piece could not be stored: {facts.eager_reason or lacking}"
        elif any(each.outcome.error for each in facts.post_grad):
            why = "a piece was not stored: a pass inside Inductor failed"
        else:
            key, why = key_of(task.factors), ""
            pending = _PendingSave(task.factors, facts, done, adapted)
            if task.static is not None and needs_tuning(task.static):
                self._pending.append(pending)
            else:
                self._save(pending)
        if why:
            self._release_claim(task)
        if why and self._store is not None:
            self._not_saved.append(why)
        return CompiledPiece(
            run=adapted,
            seconds=seconds,
            kernels=facts.kernels,
            note=facts.note,
            post_grad=facts.post_grad,
            key=key,
            eager_reason=facts.eager_reason,
            fallback=Fallback(partial(build_graph_runner, task.piece.graph_module), facts.writes)
            if is_compiled
            else None,
        )

    def _save(self, each: _PendingSave) -> None:
        assert self._store is not None, "only a piece with a key is saved"
        reason = self._store.save(each.factors, each.facts, each.done)
        if reason is not None:
            self._not_saved.append(reason)
        if self._flights is not None:
            self._flights.release(key_of(each.factors))


def _piece_files(artifact: bytes, libraries: Mapping[str, Path]) -> PieceFiles:
    """Read the files of a compiled piece. Raises OSError."""
    return PieceFiles(artifact=artifact, libraries={name: path.read_bytes() for name, path in libraries.items()})


@dataclass(frozen=True, slots=True)
class _PendingSave:
    """A compiled piece that is saved after it was tuned."""

    factors: Mapping[str, Any]
    facts: PieceFacts
    done: LoadedPiece
    run: RunPiece  # the function that the caller tunes
