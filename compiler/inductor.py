"""The Inductor piece compiler: each unique piece through `standalone_compile`, in processes of its own.

A process compiles one piece at a time and writes the artifact to a file; this process loads it. What Inductor and
Triton would keep for later lies in folders of this process alone: what is kept is in our own cache, and a piece that
is there is loaded. A piece that only this process can compile is compiled here, and the note says why.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from piecegraph.cache.keys import key_of
from piecegraph.compiler.as_it_is import NOTE, runs_as_it_is
from piecegraph.compiler.compile_pool import CompileFailure, CompileJob, CompilePool, CompileResult
from piecegraph.compiler.compile_process import num_workers
from piecegraph.compiler.cpp_libraries import cpp_libraries
from piecegraph.compiler.early_processes import early_processes
from piecegraph.compiler.errors_of_pieces import piece_failed, shortened
from piecegraph.compiler.inductor_artifact import artifact_bytes
from piecegraph.compiler.inductor_caches import inductor_cache_dir
from piecegraph.compiler.inductor_compile import (
    POST_GRAD_OPTION,
    asks_dynamo_to_trace_again,
    generated_kernels,
    standalone_compile,
)
from piecegraph.compiler.inductor_files import LoadedPiece, PieceFiles, load_files
from piecegraph.compiler.inductor_options import (
    NOTHING_MEASURED,
    inductor_option_names,
    is_tuned_at_compile_time,
    no_compile_workers,
    unknown_inductor_options,
)
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.piece_compiler import NO_PASSES, CompiledPiece, OnPiece, RunPiece
from piecegraph.compiler.piece_format import NotExpressible, dump_piece, load_piece, only_known_here
from piecegraph.compiler.post_grad import PostGrad, PostGradOutcome, PostGradRun
from piecegraph.compiler.private_folder import private_folder
from piecegraph.compiler.process_settings import process_settings
from piecegraph.compiler.static_piece import StaticPiece
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.own_kernels import OWN_KERNELS
from piecegraph.compiler.stored.piece_store import PieceFacts, PieceStore, device_of_piece, piece_factors
from piecegraph.compiler.torch_compat import tuned_at_first_run
from piecegraph.errors import ConfigError, KeyFactorError, did_you_mean
from piecegraph.passes.pass_data import NotData


class InductorPieceCompiler:
    """Compiles with `workers` processes (None: as `num_workers` says; 0 or 1: in this process).

    `options` are Inductor's, `static_options` those on top of them for static pieces of sizes
    up to `static_options_up_to`.
    """

    name = "inductor"

    def __init__(
        self,
        options: Mapping[str, Any],
        workers: int | None,
        static_options: Mapping[str, Any] | None = None,
        static_options_up_to: int = 2**31,
        cache: CompileCache | None = None,
    ) -> None:
        self.options = dict(options)
        self.static_options_up_to = static_options_up_to
        self.static_options = dict(static_options or {})
        self.workers = num_workers(workers)
        early = early_processes()
        folders = None if early is None else early.folders()
        self._inductor, self._triton = folders or (private_folder("inductor"), private_folder("triton"))
        self._pool: CompilePool | None = None
        self._cache = cache
        self._store = PieceStore(cache, self._triton) if cache is not None and cache.store is not None else None
        self._to_keep: list[_ToKeep] = []
        self._not_kept: list[str] = []  # why pieces that were compiled are not among them

    def start(self) -> None:
        """Start worker processes, unless some have started early, so that their imports overlap with tracing."""
        if self.workers > 1 and self._pool is None and _is_data(self.options):
            early = early_processes()
            started = [] if early is None else early.take()
            try:
                self._pool = CompilePool(self.workers, self._inductor, self._triton, started)
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
        if post_grad.passes and POST_GRAD_OPTION in {**self.options, **self.static_options}:
            raise ConfigError(
                f"inductor_options has {POST_GRAD_OPTION!r}, which {post_grad.passes[0].name!r} needs; "
                "give that pass as a GraphPass too (docs/writing_a_pass.md)."
            )
        for field, options in (("inductor_options", self.options), ("compile_sizes_options", self.static_options)):
            unknown = unknown_inductor_options(options)
            if unknown:
                hint = did_you_mean(unknown[0], inductor_option_names())
                raise ConfigError(f"{field} has {unknown[0]!r}, which is no torch._inductor.config field.{hint}")
        if self._cache is not None and pieces:
            OWN_KERNELS.begin_without_plan(self._cache, pieces, device_of_piece(pieces[0]))
        compiled: dict[int, CompiledPiece] = {}
        options = {**NOTHING_MEASURED, **self.options}
        tasks = [_Task(piece, options) for piece in pieces]
        for index, outcome in self._compile_all(tasks, post_grad, meanwhile=meanwhile):
            if isinstance(outcome, _Failure):
                failed = pieces[index]
                name = f"unique piece {failed.index}"
                raise piece_failed(name, failed.num_nodes, outcome.reason) from outcome.cause
            compiled[index] = outcome
            on_piece(len(compiled))
        return tuple(compiled[index] for index in range(len(pieces)))

    def compile_static(
        self, pieces: Sequence[StaticPiece], on_piece: OnPiece, post_grad: PostGrad = NO_PASSES
    ) -> tuple[CompiledPiece | str, ...]:
        """Measuring waits for `tune`, so that pieces compile side by side; where `static_options` ask for
        measurements while compiling (max_autotune), one at a time."""
        plain = {**tuned_at_first_run(), **self.options}
        tuned = {**plain, **self.static_options}
        tasks = [
            _Task(static.piece, tuned if static.size <= self.static_options_up_to else plain, static)
            for static in pieces
        ]
        at_once = 1 if any(is_tuned_at_compile_time(task.options) for task in tasks) else None
        outcomes: dict[int, CompiledPiece | str] = {}
        for index, outcome in self._compile_all(tasks, post_grad, at_once=at_once):
            outcomes[index] = shortened(outcome.reason) if isinstance(outcome, _Failure) else outcome
            on_piece(len(outcomes))
        return tuple(outcomes[index] for index in range(len(pieces)))

    def tune(self, run: RunPiece, inputs: Sequence[Any]) -> None:
        folders = inductor_cache_dir(self._inductor, self._triton)
        with folders, no_compile_workers(), torch.no_grad():
            run(*inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    @property
    def keeps(self) -> bool:
        return self._store is not None

    def keep(self) -> tuple[str, ...]:
        reasons, self._not_kept = self._not_kept, []
        for each in self._to_keep:
            assert self._store is not None, "only what has a key is to be kept"
            reason = self._store.save(each.factors, each.facts, each.done)
            reasons += [reason] if reason is not None else []
        self._to_keep = []
        OWN_KERNELS.keep()
        return tuple(dict.fromkeys(reasons))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _compile_all(
        self,
        tasks: Sequence[_Task],
        post_grad: PostGrad,
        *,
        at_once: int | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Iterator[tuple[int, CompiledPiece | _Failure]]:
        """What becomes of each task, by its number, as it is known."""
        to_compile = []
        for index, task in enumerate(tasks):
            task.factors = self._factors(task, post_grad)
            loaded = self._from_cache(task)
            if loaded is not None:
                yield index, loaded
            elif (
                task.static is None
                and not post_grad.passes
                and not self.options
                and runs_as_it_is(task.piece.graph_module)
            ):
                yield index, self._as_it_is(task)
            else:
                to_compile.append(index)
        if not to_compile:
            return
        texts, notes = self._as_data({index: tasks[index] for index in to_compile})
        try:
            passes = post_grad.as_data()
        except NotData as reason:
            passes = {}
            notes = {index: note or f"compiled in this process: {reason}" for index, note in notes.items()}
        elsewhere = [index for index in to_compile if not notes[index]] if self._pool is not None else []
        with tempfile.TemporaryDirectory(prefix="piecegraph-") as folder:
            if self._pool is not None and elsewhere:
                jobs = [_job(index, tasks[index], texts[index], Path(folder), passes) for index in elsewhere]
                self._pool.submit(jobs, at_once=at_once)
                meanwhile()
            for index in to_compile:
                if index not in elsewhere:
                    yield index, self._compile_here(tasks[index], texts.get(index), notes[index], post_grad)
            if self._pool is not None and elsewhere:
                for result in self._pool.results():
                    index = result.job.index
                    if isinstance(result, CompileFailure) and result.is_only_there:
                        note = f"compiled in this process: {result.reason}"
                        yield index, self._compile_here(tasks[index], texts[index], note, post_grad)
                    elif isinstance(result, CompileFailure):
                        yield index, _Failure(result.reason)
                    else:
                        yield index, self._loaded(tasks[index], result, texts[index])

    def _factors(self, task: _Task, post_grad: PostGrad) -> dict[str, Any] | None:
        """Of the task's key; None: there is no cache, or no key can be made."""
        if self._store is None:
            return None
        size = task.static.size if task.static is not None else None
        factors = piece_factors(task.piece, size, task.options, post_grad)
        try:
            key_of(factors)
        except KeyFactorError:
            return None
        return factors

    def _from_cache(self, task: _Task) -> CompiledPiece | None:
        if self._store is None or task.factors is None:
            return None
        key = key_of(task.factors)
        found = self._store.load(key)
        if found is None:
            return None
        facts = found.facts
        return CompiledPiece(
            run=found.run,
            seconds=found.seconds,
            kernels=facts.kernels,
            note=facts.note,
            post_grad=facts.post_grad,
            key=key,
            is_loaded=True,
        )

    def _as_it_is(self, task: _Task) -> CompiledPiece:
        begin = time.perf_counter()
        try:
            text: str | None = dump_piece(task.piece.graph_module)
        except NotExpressible:
            text = None
        done = LoadedPiece.of_graph(task.piece.graph_module)
        seconds = time.perf_counter() - begin
        facts = task.facts(0, NOTE, (), text, seconds)
        return self._done(task, done.run, facts, done if text is not None else None, seconds)

    def _as_data(self, tasks: Mapping[int, _Task]) -> tuple[dict[int, str], dict[int, str]]:
        """Tasks by number as data another process can compile, and for each a note: why it cannot, or nothing."""
        texts: dict[int, str] = {}
        notes: dict[int, str] = {}
        by_piece: dict[int, str] = {}
        for index, task in tasks.items():
            private = only_known_here(task.piece.graph_module)
            if not _is_data(task.options):
                notes[index] = "compiled in this process: the options hold an object"
            elif private is not None:
                notes[index] = f"compiled in this process: only it knows {private}"
            else:
                notes[index] = ""
            try:
                if task.piece.index not in by_piece:
                    by_piece[task.piece.index] = dump_piece(task.piece.graph_module)
                texts[index] = by_piece[task.piece.index]
            except NotExpressible as reason:
                notes[index] = f"compiled in this process: {reason}"
        return texts, notes

    def _compile_here(self, task: _Task, text: str | None, note: str, post_grad: PostGrad) -> CompiledPiece | _Failure:
        if text is None and task.static is not None:
            return _Failure(f"it cannot be made static: {note}")
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
            return _Failure(f"{type(error).__name__}: {error}", error)
        kernels = generated_kernels() - kernels
        seconds = time.perf_counter() - begin
        artifact = artifact_bytes(run)
        done = None
        if artifact is not None:
            done = LoadedPiece(run, self._inductor, self._triton, _piece_files(artifact, libraries))
        facts = task.facts(kernels, note, tuple(passes.outcomes), text, seconds)
        return self._done(task, run, facts, done, seconds)

    def _loaded(self, task: _Task, result: CompileResult, text: str) -> CompiledPiece | _Failure:
        begin = time.perf_counter()
        try:
            done = load_files(_piece_files(result.job.artifact.read_bytes(), result.libraries), self._triton)
        except Exception as error:
            return _Failure(f"loading its artifact: {type(error).__name__}: {error}", error)
        facts = task.facts(result.kernels, "", result.post_grad, text, result.seconds)
        return self._done(task, done.run, facts, done, result.seconds + time.perf_counter() - begin)

    def _done(
        self, task: _Task, run: RunPiece, facts: PieceFacts, done: LoadedPiece | None, seconds: float
    ) -> CompiledPiece:
        """A piece that was compiled, and is kept later unless something keeps it from that."""
        key = None
        if task.factors is None:
            why = "a piece could not be stored: its options or its passes hold what is no plain data"
        elif done is None:
            lacking = "its graph is no plain data" if facts.note == NOTE else "torch saves nothing of it"
            why = f"a piece could not be stored: {lacking}"
        elif any(each.outcome.error for each in facts.post_grad):
            why = "a piece was not stored: a pass inside Inductor failed"
        else:
            key, why = key_of(task.factors), ""
            self._to_keep.append(_ToKeep(task.factors, facts, done))
        if why and self._store is not None:
            self._not_kept.append(why)
        return CompiledPiece(
            run=facts.adapted(run),
            seconds=seconds,
            kernels=facts.kernels,
            note=facts.note,
            post_grad=facts.post_grad,
            key=key,
        )


def _piece_files(artifact: bytes, libraries: Mapping[str, Path]) -> PieceFiles:
    """Raises OSError."""
    return PieceFiles(artifact=artifact, libraries={name: path.read_bytes() for name, path in libraries.items()})


@dataclass(frozen=True, slots=True)
class _ToKeep:
    factors: Mapping[str, Any]
    facts: PieceFacts
    done: LoadedPiece


@dataclass(frozen=True, slots=True)
class _Failure:
    """A piece that could not be compiled."""

    reason: str
    cause: Exception | None = None


@dataclass(slots=True)
class _Task:
    """A piece to compile, dynamic or at one size."""

    piece: UniquePiece
    options: Mapping[str, Any]
    static: StaticPiece | None = None
    factors: dict[str, Any] | None = None  # of its key in the cache; None: it has none

    @property
    def sizes(self) -> dict[str, int] | None:
        return self.static.sizes if self.static is not None else None

    def facts(
        self, kernels: int, note: str, post_grad: tuple[PostGradOutcome, ...], text: str | None, seconds: float
    ) -> PieceFacts:
        """A static piece takes no sizes."""
        positions = self.static.tensor_positions if self.static is not None else None
        return PieceFacts(
            nodes=self.piece.num_nodes,
            kernels=kernels,
            note=note,
            takes=None if positions is None or len(positions) == len(self.piece.examples) else positions,
            post_grad=post_grad,
            graph=self.piece.text,
            graph_data=text,
            seconds={"compile": seconds},
        )


def _is_data(options: Mapping[str, Any]) -> bool:
    try:
        json.dumps(options)
    except TypeError:
        return False
    return True


def _job(index: int, task: _Task, text: str, folder: Path, post_grad: Mapping[str, Any]) -> CompileJob:
    graph = folder / f"{index}.json"
    graph.write_text(text)
    return CompileJob(
        index=index,
        graph=graph,
        artifact=folder / f"{index}.artifact",
        weight=task.piece.num_nodes,
        options=dict(task.options),
        settings=process_settings(),
        sizes=task.sizes,
        post_grad=post_grad,
    )
