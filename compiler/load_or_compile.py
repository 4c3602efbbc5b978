"""`load_or_compile`, which loads a compiled model from the cache, or compiles it and stores it there."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from piecegraph.cache.store.single_flight import Patience
from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.compiler.building.build import BeforeCompile, inductor_compiler, piece_compiler
from piecegraph.compiler.building.cold_start import ColdStart, cold_start
from piecegraph.compiler.building.deferred_weights import DeferredWeights, LoadWeights, TracedModelMismatch
from piecegraph.compiler.building.ready import ReadyModel
from piecegraph.compiler.common.private_folder import sweep_folders
from piecegraph.compiler.common.report import CacheReport, CompileReport
from piecegraph.compiler.piece_compilers.graphs_first import GraphsFirst
from piecegraph.compiler.plans.plan_store import PlanStore
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.tracing.dynamic_dims import DynamicDims
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.config import CompileConfig
from piecegraph.errors import KeyFactorError
from piecegraph.progress import OnPhase, Phase, timed_phase

logger = logging.getLogger(__name__)


def load_or_compile(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_dims: DynamicDims,
    config: CompileConfig,
    *,
    on_phase: OnPhase,
    before_compile: BeforeCompile | None,
    cache: CompileCache | None = None,
    load_weights: LoadWeights | None = None,
    background: BackgroundCompile | None = None,
    waits_for_others: bool = False,
) -> ReadyModel:
    """Return `module` compiled for calls like this one, from `cache` if possible.

    `cache=None` stands for the cache that `config` and the environment choose. Raises what `piecegraph.compile` raises;
    problems of the cache are never raised but reported (`CacheReport`).

    Parameters and buffers may be fake tensors: the compiled model can then be stored but not called, unless
    `load_weights` returns the same module with real tensors. It is called once: as soon as the cache is found to have
    the model, else while pieces compile.

    `background` compiles the pieces of a model that the cache does not have; the returned model runs their graphs until
    then. `load_weights` must be None.

    Of several processes that need the same model at once, one compiles and the others wait, unless `before_compile`
    `waits_for_others`. The same holds for a piece that models share, and for the pieces of a model without a key.
    """
    sweep_folders()
    request = _Request(
        args=args,
        kwargs=kwargs,
        dynamic_dims=dynamic_dims,
        config=config,
        on_phase=on_phase,
        before_compile=before_compile,
        cache=CompileCache.open(config) if cache is None else cache,
        background=background,
        waits_for_others=waits_for_others,
    )
    assert background is None or load_weights is None, "a model that runs before it is compiled has its weights"
    if load_weights is None:
        return request(module)
    load = functools.cache(load_weights)
    try:
        return request(module, deferred=DeferredWeights.of(module, load))
    except _LoadWeightsFirst:
        why = ""
    except (TracedModelMismatch, KeyFactorError) as error:
        why = str(error)
    ready = request(load())  # outside the except block, so that the error keeps no tensor alive and is not a cause
    return ready.with_report(replace(ready.built.report, weights_first=why)) if why else ready


class _LoadWeightsFirst(Exception):
    """The signal that the cache has the model, so that weights are loaded now: there is no compile to overlap with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A request to load or compile a module for one kind of call."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dynamic_dims: DynamicDims
    config: CompileConfig
    on_phase: OnPhase
    before_compile: BeforeCompile | None
    cache: CompileCache
    background: BackgroundCompile | None
    waits_for_others: bool

    def __call__(self, module: torch.nn.Module, deferred: DeferredWeights | None = None) -> ReadyModel:
        """Load or compile `module`.

        With `deferred`, raises `_LoadWeightsFirst` where the cache has the model, and `TracedModelMismatch`.
        """
        plans = None
        if self.cache.stores_plans:
            with timed_phase(self.on_phase, "cache_key"):
                call = ExampleCall.of(module, self.args, self.kwargs, self.dynamic_dims)
                plans = PlanStore.of(self.cache, module, call, self.config)
        if self.background is not None and self.config.compiler == "inductor":
            return self._compile_later(module, plans, self.background)
        if plans is None or plans.key is None:
            ready, why = self._compile(module, deferred, plans)
            state = "off" if plans is None else "miss"
            return _with_cache_report(ready, CacheReport(state=state, reason=why, not_stored=why))
        found = self._find(plans, plans.key, deferred)
        if found is not None:
            return found
        # Whoever waits for others while they wait for its lock would wait for ever.
        flight = contextlib.nullcontext() if self.waits_for_others else self.cache.flight(plans.key, self._on_wait)
        with flight as held:
            if held is not None and held.waited_s > 0 and (found := self._find(plans, plans.key, deferred)) is not None:
                return found
            reason = self.cache.misses.get(plans.key, "")
            ready, not_stored = self._compile(module, deferred, plans)
        return _with_cache_report(ready, CacheReport(state="miss", key=plans.key, reason=reason, not_stored=not_stored))

    def _compile_later(
        self, module: torch.nn.Module, plans: PlanStore | None, background: BackgroundCompile
    ) -> ReadyModel:
        """Return the model of the cache, or one whose pieces run as their graphs until `background` has compiled them.

        Another process that compiles the same model is waited for in the background.
        """
        key = "" if plans is None or plans.key is None else plans.key
        if plans is not None and key and (found := self._find(plans, key, None)) is not None:
            return found
        self.cache.patience = Patience(sleep=background.sleep)
        later = inductor_compiler(self.config, self.cache, _log_wait, is_in_background=True)
        try:
            cold = cold_start(
                module,
                self.args,
                self.kwargs,
                self.dynamic_dims,
                self.config,
                GraphsFirst(later.name, start=later.start, prepare=later.prepare),
                on_phase=self.on_phase,
                before_compile=self.before_compile,
            )
        except BaseException:
            later.close()
            raise
        report = CacheReport(
            state="off" if plans is None else "miss",
            key=key,
            reason=self.cache.misses.get(key, "") if key else "",
            not_stored="it is compiled while it runs",
        )
        ready = _with_cache_report(cold.ready, report)

        def finish(compiled: ReadyModel) -> CompileReport:
            why = self._save(replace(cold, ready=compiled), plans, lambda phase: None)
            return _with_cache_report(compiled, replace(report, not_stored=why)).built.report

        flight = partial(self.cache.flight, key, _log_wait) if key else contextlib.nullcontext
        background.begin(ready, later, finish, flight)
        return ready

    def _on_wait(self, holder: str) -> None:
        self.on_phase(Phase(name="compile", detail=holder))

    def _find(self, plans: PlanStore, key: str, deferred: DeferredWeights | None) -> ReadyModel | None:
        if deferred is not None and self.cache.has(key):
            raise _LoadWeightsFirst
        return plans.load(self.on_phase, self.before_compile)

    def _compile(
        self, module: torch.nn.Module, deferred: DeferredWeights | None, plans: PlanStore | None
    ) -> tuple[ReadyModel, str]:
        """Compile and store the model; return it, and why it is not stored ("" if it is)."""
        compiler = piece_compiler(self.config, self.cache, self._on_wait)
        with contextlib.closing(compiler):
            cold = cold_start(
                module,
                self.args,
                self.kwargs,
                self.dynamic_dims,
                self.config,
                compiler,
                on_phase=self.on_phase,
                before_compile=self.before_compile,
                deferred=deferred,
            )
        return cold.ready, self._save(cold, plans, self.on_phase)

    def _save(self, cold: ColdStart, plans: PlanStore | None, on_phase: OnPhase) -> str:
        """Store a compiled model; return why it is not stored ("" if it is)."""
        if plans is None:
            self.cache.enforce_max_size()
            return "; ".join(filter(None, (self.cache.reason, *cold.ready.built.not_saved)))
        with timed_phase(on_phase, "store"):
            why = plans.save(cold)
            self.cache.enforce_max_size()
        return why


def _log_wait(holder: str) -> None:
    logger.info("%s", holder)


def _with_cache_report(ready: ReadyModel, report: CacheReport) -> ReadyModel:
    """Return `ready` with `report` as the cache section of its report."""
    old = ready.built.report
    report = replace(report, loaded_pieces=old.cache.loaded_pieces)
    return ready.with_report(replace(old, cache=report))
