"""Compiled models in the cache: a plan with the keys of its pieces."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.keys import key_of, plain
from piecegraph.cache.store.store import Loaded, NotSaved
from piecegraph.compiler.building.bound_weights import BoundWeights
from piecegraph.compiler.building.build import BeforeCompile, BuildResult
from piecegraph.compiler.building.cold_start import ColdStart
from piecegraph.compiler.building.ready import ReadyModel
from piecegraph.compiler.common.call_targets import NotStorable
from piecegraph.compiler.common.private_folder import private_folder
from piecegraph.compiler.common.report import CacheReport, CompileReport
from piecegraph.compiler.inductor.artifact import import_loader
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
from piecegraph.compiler.piece_compilers.forwards import Forwards, mark_failures
from piecegraph.compiler.plans.bindings import BoundTensors, bind, bindings_of, constants_of, members_of
from piecegraph.compiler.plans.plan_factors import device_of, plan_factors
from piecegraph.compiler.plans.plan_format import StoredPlan, from_document, result_spec, to_document
from piecegraph.compiler.rewriting.expectations import check_expected_matches, check_expected_run
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.piece_format import load_piece
from piecegraph.compiler.splitting.stitch import generate_source
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.store.piece_store import PieceStore, StoredPiece, has_artifact
from piecegraph.compiler.tracing.guards import GuardAudit, GuardRecord
from piecegraph.compiler.tracing.signature import ExampleCall, Interface
from piecegraph.compiler.tracing.traced_reads import find_changed_read
from piecegraph.compiler.tracing.traced_sources import digests_by_module, find_changed_module
from piecegraph.config import CompileConfig
from piecegraph.errors import KeyFactorError
from piecegraph.passes.pipeline import pipeline
from piecegraph.progress import OnPhase, Phase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStore:
    """The stored plan of one module for one kind of call under one config.

    `key` is None if no key can be made; `reason` then says why.
    """

    cache: CompileCache
    module: torch.nn.Module
    call: ExampleCall
    config: CompileConfig
    factors: Mapping[str, Any]
    key: str | None
    reason: str = ""
    began: float  # when the computation of the key began, by `time.perf_counter`

    @classmethod
    def of(cls, cache: CompileCache, module: torch.nn.Module, call: ExampleCall, config: CompileConfig) -> PlanStore:
        """Compute the key of a plan. Weights are not read."""
        began = time.perf_counter()
        factors: dict[str, Any] = {}
        key, reason = None, ""
        try:
            factors = plain(plan_factors(module, call, config))
            key = key_of(factors)
        except KeyFactorError as error:
            reason = str(error)
        return cls(
            cache=cache, module=module, call=call, config=config, factors=factors, key=key, reason=reason, began=began
        )

    def load(self, on_phase: OnPhase, before_compile: BeforeCompile | None) -> ReadyModel | None:
        """Return the stored model with its pieces loaded and its weights bound; None if it must be compiled.

        In either case our own kernels are loaded from the cache and saved there from now on. Raises `PassExpectation`
        as the compile would, and what `before_compile` raises.
        """
        started = time.perf_counter()
        found = self._load(started, on_phase, before_compile)
        if found is None:
            on_phase(Phase(name="look_up", seconds=time.perf_counter() - started))
        return found

    def _load(self, started: float, on_phase: OnPhase, before_compile: BeforeCompile | None) -> ReadyModel | None:
        assert self.key is not None, "a plan without a key is not stored"
        OWN_KERNELS.begin(self.cache, self.key, device_of(self.module))
        loaded = self.cache.load(self.key)
        if loaded is None:
            return None
        store = PieceStore(self.cache, private_folder("triton"))
        import_seconds = 0.0
        try:
            with _reading():
                stored = from_document(json.loads(loaded.blobs["plan"]))
                values = _values_of_reads(stored, self.module)
                if self.config.strict and stored.report.eager_pieces:
                    raise NotStorable("a piece of it runs eagerly, which strict=True makes an error")
                read = {key: self._read(store, key) for key in (*stored.pieces, *stored.static.values())}
            if any(map(has_artifact, read.values())):
                import_seconds = self._import_loader()
            with _reading():
                pieces = {key: self._piece(store, key, each) for key, each in read.items()}
                members, constants = members_of(stored, self.module), constants_of(stored, loaded.blobs, values)
        except NotStorable as error:
            self.cache.reject(self.key, str(error))
            return None
        self._check_expected(stored.report)
        if before_compile is not None:
            before_compile(stored.split_calls)
        begin = time.perf_counter()
        bound = bind(stored, members, constants)
        bind_seconds = time.perf_counter() - begin
        ready = self._ready(stored, loaded, pieces, bound)
        seconds = time.perf_counter() - started - import_seconds - bind_seconds
        with_key = time.perf_counter() - self.began - import_seconds - bind_seconds
        detail = f"{len(stored.plan.piece_steps)} pieces, {len(stored.pieces)} unique"
        on_phase(Phase(name="import_loader", seconds=import_seconds))
        on_phase(Phase(name="load_compiled", seconds=seconds, detail=detail))
        on_phase(Phase(name="bind_weights", seconds=bind_seconds))
        took = sum(loaded.entry.seconds.values()) + sum(sum(each.facts.seconds.values()) for each in pieces.values())
        report = CacheReport(
            state="hit",
            key=self.key,
            loaded_pieces=len(pieces),
            load_seconds=with_key,
            import_seconds=import_seconds,
            bind_seconds=bind_seconds,
            saved_seconds=max(took - with_key, 0.0),
        )
        return ready.with_report(replace(ready.built.report, cache=report))

    def _read(self, store: PieceStore, key: str) -> Loaded:
        read = store.read(key)
        if read is None:
            raise NotStorable(f"a piece of it, {key[:12]}: {self.cache.misses[key]}")
        return read

    def _piece(self, store: PieceStore, key: str, read: Loaded) -> StoredPiece:
        found = store.loaded(key, read)
        if found is None:
            raise NotStorable(f"a piece of it, {key[:12]}: {self.cache.misses[key]}")
        return found

    def _import_loader(self) -> float:
        """Import what loading artifacts needs; return the seconds it took."""
        return import_loader()

    def _check_expected(self, report: CompileReport) -> None:
        names = [each.name for each in pipeline(self.config.passes, device_of(self.module).type)]
        check_expected_run(self.config.expect, names)
        check_expected_matches(self.config.expect, report.passes)

    def _ready(
        self, stored: StoredPlan, loaded: Loaded, pieces: Mapping[str, StoredPiece], bound: BoundTensors
    ) -> ReadyModel:
        source = generate_source(stored.plan)
        namespace = {"torch": torch, "device": torch.device, **stored.targets, **bound.tensors}
        found = [pieces[key] for key in stored.pieces]
        forwards = Forwards(
            source,
            namespace,
            [piece.run for piece in found],
            {at: pieces[key].run for at, key in stored.static.items()},
            stored.symbols,
            {} if self.config.strict else {i: piece.fallback for i, piece in enumerate(found) if piece.fallback},
        )
        forwards.on_failure = self.keep_failure
        built = BuildResult(
            forwards=forwards,
            plan=stored.plan,
            source=source,
            namespace=namespace,
            split_calls=stored.split_calls,
            read_unique=lambda: _unique_pieces(stored, pieces),
            symbols=stored.symbols,
            pieces=(),
            static_keys=stored.static,
            not_saved=(),
            size_conditions=stored.conditions,
            report=_report(stored, pieces),
        )
        interface = Interface(
            call_spec=self.call.call_spec,
            result_spec=result_spec(stored, bound.by_names),
            arguments=stored.arguments,
            size_symbols=stored.size_symbols,
            read_guards=lambda: _guards(loaded.blobs["guards"]),
        )
        return ReadyModel(interface, built, BoundWeights(self.module, bound.watched, namespace.values()))

    def save(self, cold: ColdStart) -> str:
        """Save the compiled model, and later its failed pieces; return why it cannot be saved, or ""."""
        if self.key is None:
            return self.reason
        try:
            entry, blobs = self._entry(cold)
        except NotStorable as reason:
            return str(reason)
        saved = self.cache.save(entry, blobs)
        if isinstance(saved, NotSaved):
            return saved.reason
        cold.ready.built.forwards.on_failure = self.keep_failure
        return ""

    def keep_failure(self, unique: int, size: int | None, reason: str) -> None:
        """Make later starts use the graph of a dynamic piece that failed its own checks, or drop a static piece.

        The entry of the piece stays for other plans. Never raises.
        """
        try:
            self._keep_failure(unique, size, reason)
        except (NotStorable, KeyError, TypeError, ValueError) as error:
            logger.warning("the failed check of a piece could not be recorded in the cache: %s", error)

    def _keep_failure(self, unique: int, size: int | None, reason: str) -> None:
        loaded = None if self.key is None else self.cache.load(self.key)
        if loaded is None:
            return
        with _reading():
            stored = from_document(json.loads(loaded.blobs["plan"]))
        pieces, static = list(stored.pieces), dict(stored.static)
        if size is not None:
            static.pop((unique, size), None)
        else:
            store = PieceStore(self.cache, private_folder("triton"))
            pieces[unique] = store.save_as_graph(pieces[unique], reason)
        stored = replace(
            stored,
            pieces=tuple(pieces),
            static=static,
            report=mark_failures(stored.report, {(unique, size): reason}),
        )
        blobs = {**loaded.blobs, "plan": json.dumps(to_document(stored)).encode()}
        old = loaded.entry
        entry = Entry.of(
            old.factors,
            blobs,
            created=old.created,
            seconds=old.seconds,
            versions=old.versions,
            notes={**old.notes, **_notes_on_pieces(stored)},
        )
        saved = self.cache.save(entry, blobs)
        if isinstance(saved, NotSaved):
            raise NotStorable(saved.reason)

    def _entry(self, cold: ColdStart) -> tuple[Entry, dict[str, bytes]]:
        """Return the entry of a model and its blobs. Raises `NotStorable`."""
        built, report = cold.ready.built, cold.ready.built.report
        _refuse_what_failed(built)
        if cold.traced.reads.not_comparable:
            raise NotStorable(cold.traced.reads.not_comparable[0])
        bindings, made = bindings_of(built, cold.traced)
        stored = StoredPlan(
            plan=built.plan,
            targets={step.function: built.namespace[step.function] for step in built.plan.call_steps},
            bindings=bindings,
            arguments=cold.ready.interface.arguments,
            size_symbols=cold.ready.interface.size_symbols,
            results=made.results(cold.traced),
            tree=cold.ready.interface.result_spec.tree,
            conditions=built.size_conditions,
            symbols=built.symbols,
            pieces=tuple(_key(piece.key) for piece in built.pieces),
            static={at: _key(key) for at, key in built.static_keys.items()},
            split_calls=built.split_calls,
            sources=digests_by_module(cold.traced.sources),
            reads=cold.traced.reads,
            report=report,
        )
        guards = cold.traced.guards
        records = [[record.kind, record.subject, record.scope] for record in guards]
        blobs = {
            "plan": json.dumps(to_document(stored)).encode(),
            "guards": json.dumps({"records": records, "note": guards.note}).encode(),
            "source": built.source.encode(),
            **made.blobs,
        }
        entry = Entry.of(
            self.factors,
            blobs,
            created=time.time(),
            seconds={"trace": report.trace_seconds, "split": report.split_seconds},
            versions=self.cache.versions(),
            notes=self._notes(stored),
        )
        return entry, blobs

    def _notes(self, stored: StoredPlan) -> dict[str, Any]:
        """Return what `cache ls` and `cache show` display."""
        parameters = {id(each): each for each in self.module.parameters()}.values()
        dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in parameters})
        inner = next((each for each in self.module.children()), self.module)
        kind = type(self.module if not type(self.module).__module__.startswith("piecegraph.") else inner)
        return {
            "model": kind.__name__,
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "num_parameters": sum(each.numel() for each in parameters),
            "dtype": ", ".join(dtypes),
            "num_pieces": stored.report.num_pieces,
            "num_unique_pieces": stored.report.num_unique_pieces,
            "passes": {row.name: row.matches for row in stored.report.passes},
            **_notes_on_pieces(stored),
        }


def _notes_on_pieces(stored: StoredPlan) -> dict[str, Any]:
    eager = {str(index): reason for index, reason in stored.report.eager_pieces.items()}
    return {
        "sizes": list(stored.report.static_sizes),
        "pieces": sorted({*stored.pieces, *stored.static.values()}),
        **({"eager_pieces": eager} if eager else {}),
    }


@contextmanager
def _reading() -> Iterator[None]:
    """Raise `NotStorable` instead of the errors that reading a malformed entry raises."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotStorable(f"reading its plan: {type(error).__name__}: {error}") from error


def _report(stored: StoredPlan, pieces: Mapping[str, StoredPiece]) -> CompileReport:
    """Return the report of the compile, with the seconds of loading."""
    unique = [
        replace(row, compile_seconds=pieces[stored.pieces[row.index]].seconds) for row in stored.report.unique_pieces
    ]
    static = [
        replace(
            row,
            compile_seconds=pieces[stored.static[row.unique, row.size]].seconds if row.is_used else 0.0,
            tune_seconds=0.0,
        )
        for row in stored.report.static_pieces
    ]
    return replace(
        stored.report,
        trace_seconds=0.0,
        split_seconds=0.0,
        compile_seconds=sum(row.compile_seconds for row in unique),
        stitch_seconds=0.0,
        static_compile_seconds=sum(row.compile_seconds for row in static),
        static_tune_seconds=0.0,
        unique_pieces=tuple(unique),
        static_pieces=tuple(static),
    )


def _values_of_reads(stored: StoredPlan, module: torch.nn.Module) -> list[Any]:
    """Return the values at the places that the trace read.

    Raises `NotStorable` if a trace of `module` would read something else now.
    """
    source = find_changed_module(stored.sources)
    if source is not None:
        raise NotStorable(f"the source of {source} has changed")
    reads = stored.reads
    name, values = find_changed_read(reads.places, reads.facts, reads.identities, module)
    if name is not None:
        raise NotStorable(f"{name} has changed since the model was traced")
    return values


def _refuse_what_failed(built: BuildResult) -> None:
    """Raise `NotStorable` for a build with a failure that the next compile may not have."""
    undone = next((row for row in built.report.passes if row.error), None)
    if undone is not None:
        raise NotStorable(f"pass {undone.name!r} was undone: {undone.error}")
    failed = next((row for row in built.report.static_pieces if not row.is_used and row.key), None)
    if failed is not None:
        raise NotStorable(f"a piece has no static compile for size {failed.size}: {failed.note}")
    if built.not_saved:
        raise NotStorable(built.not_saved[0])


def _key(key: str | None) -> str:
    if key is None:
        raise NotStorable("a piece could not be stored: its options or its passes hold values that are not plain data")
    return key


def _unique_pieces(stored: StoredPlan, pieces: Mapping[str, StoredPiece]) -> tuple[UniquePiece, ...]:
    """Return the graphs of the unique pieces. Raises `NotStorable` for a graph that was not stored."""
    found = []
    for index, key in enumerate(stored.pieces):
        facts, row = pieces[key].facts, stored.report.unique_pieces[index]
        if facts.graph_data is None:
            raise NotStorable("the graph of a piece is not plain data, so the cache does not have it")
        graph_module, _ = load_piece(facts.graph_data)
        steps = tuple(step.index for step in stored.plan.piece_steps if step.unique == index)
        found.append(UniquePiece(index=index, key=row.key, text=facts.graph, graph_module=graph_module, pieces=steps))
    return tuple(found)


def _guards(data: bytes) -> GuardAudit:
    found: Mapping[str, Any] = {"records": [], "note": "the cache has no guards of this model"}
    with suppress(ValueError):
        found = json.loads(data)
    return GuardAudit(tuple(GuardRecord(*record) for record in found["records"]), found["note"])
