"""How a compiled model comes to be: from the cache, or by compiling, which fills it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    start_of = partial(
        _start,
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
        return start_of(load())
    except (NotAsTraced, KeyFactorError) as error:
        ready = start_of(load())
        return ready.with_report(replace(ready.built.report, weights_first=str(error)))


class _WeightsFirst(Exception):
    """There is nothing to compile, so nothing to do while weights are loaded."""


def _start(
    module: torch.nn.Module,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_dims: DynamicDims,
    config: CompileConfig,
    on_phase: OnPhase,
    before_compile: BeforeCompile | None,
    cache: CompileCache,
    late: LateWeights | None = None,
) -> Ready:
    """As `start`. With `late`, raises `_WeightsFirst` where the cache has the model, and `NotAsTraced`."""

    def compile_now() -> tuple[Ready, str]:
        """The model, and why it is not stored."""
        compiler = piece_compiler(config, cache)
        with contextlib.closing(compiler):
            cold = cold_start(
                module,
                args,
                kwargs,
                dynamic_dims,
                config,
                compiler,
                on_phase=on_phase,
                before_compile=before_compile,
                late=late,
            )
        if plans is None:
            return cold.ready, "; ".join(filter(None, (cache.reason, *cold.ready.built.not_kept)))
        with timed_phase(on_phase, "store"):
            return cold.ready, plans.save(cold)

    plans = None
    if cache.keeps_plans:
        with timed_phase(on_phase, "cache_key"):
            call = ExampleCall.of(module, args, kwargs, dynamic_dims)
            plans = PlanStore.of(cache, module, call, config)
    if plans is None or plans.key is None:
        ready, why = compile_now()
        state = "off" if plans is None else "miss"
        return _reported(ready, CacheReport(state=state, reason=why, not_stored=why))

    def find() -> Ready | None:
        assert plans is not None and plans.key is not None
        if late is not None and cache.has(plans.key):
            raise _WeightsFirst
        return plans.load(on_phase, before_compile)

    found = find()
    if found is not None:
        return found
    with cache.flight(plans.key) as flight:
        if flight.waited_s > 0 and (found := find()) is not None:
            return found
        reason = cache.misses.get(plans.key, "")
        ready, not_stored = compile_now()
    return _reported(ready, CacheReport(state="miss", key=plans.key, reason=reason, not_stored=not_stored))


def _reported(ready: Ready, report: CacheReport) -> Ready:
    """`ready` with `report` as its report's part on the cache."""
    old = ready.built.report
    report = replace(report, loaded_pieces=old.cache.loaded_pieces)
    return ready.with_report(replace(old, cache=report))
