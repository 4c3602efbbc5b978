"""How a compiled model comes to be: from the cache, or by compiling, which fills it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecegraph.compiler.build import BeforeCompile, piece_compiler
from piecegraph.compiler.cold_start import cold_start
from piecegraph.compiler.dynamic_dims import DynamicDims
from piecegraph.compiler.late_weights import LateWeights, LoadWeights, NotAsTraced
from piecegraph.compiler.ready import Ready
from piecegraph.compiler.report import CacheReport
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.plan_store import PlanStore
from piecegraph.compiler.trace import ExampleCall
from piecegraph.config import CompileConfig
from piecegraph.errors import KeyFactorError
from piecegraph.progress import OnPhase, timed_phase


def start(
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
) -> Ready:
    """`module` compiled for calls like this one, over `cache`; None: the one that `config` and the environment choose.
    Raises as `piecegraph.compile`; nothing that is wrong with the cache is ever raised, it is in the report.

    Parameters and buffers may be fake tensors: then what is compiled can be kept, and cannot be called, unless
    `load_weights` gives the same module with real ones. That is called once: as soon as it is known that there is
    nothing to compile, or while pieces compile.

    Of processes that need the same model at once, one compiles and the others wait.
    """
    start_of = _Start(
        args=args,
        kwargs=kwargs,
        dynamic_dims=dynamic_dims,
        config=config,
        on_phase=on_phase,
        before_compile=before_compile,
        cache=CompileCache.open(config) if cache is None else cache,
    )
    if load_weights is None:
        return start_of(module)
    load = functools.cache(load_weights)
    try:
        return start_of(module, late=LateWeights.of(module, load))
    except _WeightsFirst:
        why = ""
    except (NotAsTraced, KeyFactorError) as error:
        why = str(error)
    ready = start_of(load())  # out here, where the error keeps nothing alive and is no cause of another
    return ready.with_report(replace(ready.built.report, weights_first=why)) if why else ready


class _WeightsFirst(Exception):
    """There is nothing to compile, so nothing to do while weights are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A start of whatever module, called in one way."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dynamic_dims: DynamicDims
    config: CompileConfig
    on_phase: OnPhase
    before_compile: BeforeCompile | None
    cache: CompileCache

    def __call__(self, module: torch.nn.Module, late: LateWeights | None = None) -> Ready:
        """As `start`. With `late`, raises `_WeightsFirst` where the cache has the model, and `NotAsTraced`."""
        plans = None
        if self.cache.keeps_plans:
            with timed_phase(self.on_phase, "cache_key"):
                call = ExampleCall.of(module, self.args, self.kwargs, self.dynamic_dims)
                plans = PlanStore.of(self.cache, module, call, self.config)
        if plans is None or plans.key is None:
            ready, why = self._compile(module, late, plans)
            state = "off" if plans is None else "miss"
            return _reported(ready, CacheReport(state=state, reason=why, not_stored=why))
        found = self._find(plans, plans.key, late)
        if found is not None:
            return found
        with self.cache.flight(plans.key) as flight:
            if flight.waited_s > 0 and (found := self._find(plans, plans.key, late)) is not None:
                return found
            reason = self.cache.misses.get(plans.key, "")
            ready, not_stored = self._compile(module, late, plans)
        return _reported(ready, CacheReport(state="miss", key=plans.key, reason=reason, not_stored=not_stored))

    def _find(self, plans: PlanStore, key: str, late: LateWeights | None) -> Ready | None:
        if late is not None and self.cache.has(key):
            raise _WeightsFirst
        return plans.load(self.on_phase, self.before_compile)

    def _compile(self, module: torch.nn.Module, late: LateWeights | None, plans: PlanStore | None) -> tuple[Ready, str]:
        """The model, and why it is not stored."""
        compiler = piece_compiler(self.config, self.cache)
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
                late=late,
            )
        if plans is None:
            self.cache.keep_to_size()
            return cold.ready, "; ".join(filter(None, (self.cache.reason, *cold.ready.built.not_kept)))
        with timed_phase(self.on_phase, "store"):
            why = plans.save(cold)
            self.cache.keep_to_size()
        return cold.ready, why


def _reported(ready: Ready, report: CacheReport) -> Ready:
    """`ready` with `report` as its report's part on the cache."""
    old = ready.built.report
    report = replace(report, loaded_pieces=old.cache.loaded_pieces)
    return ready.with_report(replace(old, cache=report))
