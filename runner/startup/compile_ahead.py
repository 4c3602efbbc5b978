"""Compilation of a model into the cache from its config alone, without weights, ahead of the first `LLM`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from piecegraph.cache.store.store import Store
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.load_or_compile import load_or_compile
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
from piecegraph.compiler.plans.plan_store import PlanStore
from piecegraph.compiler.splitting.plan import SplitCall
from piecegraph.compiler.store.cache_choice import resolve_cache_mode
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.errors import CacheError, CompileError, ConfigError, KeyFactorError
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.attention.select import check_backend_name
from piecegraph.runner.common.config_on_device import batched_tokens, options_on
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.models.config.length import model_length
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.cpu_kernels import cpu_kernels_notes, keep_cpu_kernels
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.models.without_weights import load_without_weights
from piecegraph.runner.speculative.common.fitting_draft import naming_the_draft
from piecegraph.runner.speculative.heads.head_config import naming_the_head, with_head
from piecegraph.runner.speculative.heads.load_head import head_without_weights
from piecegraph.runner.startup.compiling.decide import Decided, compile_step_kernels, decide_for
from piecegraph.runner.startup.compiling.step_kernels import compiles_kernels
from piecegraph.runner.startup.drafts.draft import check_draft


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledAhead:
    """A model that is in the cache."""

    key: str  # the key of its plan
    was_cached: bool  # nothing had to be compiled
    report: CompileReport
    notes: tuple[str, ...]
    draft: CompiledAhead | None = None  # the model or head that drafts for it, if there is one


def check_can_compile_for(device: str | torch.device | None) -> None:
    """Raise `CompileError` if code for `device` cannot be generated here."""
    if device is None or not str(device).startswith("cuda") or torch.cuda.is_available():
        return
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    raise CompileError(
        f"device={str(device)!r}: code for an NVIDIA GPU is generated, and measured, on that GPU, and torch sees none "
        f"here (torch {torch.__version__} is built {build}). Compile where there is one of the kind that will run the "
        "model, with the same driver and the same CUDA build of torch; or take device='cpu' for a machine like this."
    )


def compile_ahead(
    config: EngineConfig, store: Store, *, anew: bool = False, on_phase: OnPhase | None = None
) -> CompiledAhead:
    """Put into `store` everything that an `LLM` with this config would look up on this machine, a draft model or a head
    included.

    `anew`: compile everything again, whatever the store holds.

    Raises what `LLM` raises for the model and the config; `CompileError` if the device is not available;
    `ConfigError` if the config or the environment disables the cache; `KeyFactorError` if no key can be made for the
    model; and `CacheError` if the results could not be stored.
    """
    check_backend_name(config.attention_backend)
    check_can_compile_for(config.device)
    keeps, reason = resolve_cache_mode(config.compile)
    if keeps is not True:
        raise ConfigError(f"there is nothing to fill a cache with: {reason}. Leave that setting out.")
    head = None
    if config.speculative is not None:
        config, head = with_head(config, load_config(config.source), needs_weights=False)
    loaded = load_without_weights(config, on_phase)
    max_model_len = model_length(loaded.config, config.max_model_len, loaded.first_position)
    max_num_tokens = batched_tokens(config, loaded.device.type)
    draft = check_draft(
        config,
        loaded.config,
        None,
        loaded.dtype,
        loaded.device,
        max_model_len,
        max_num_tokens,
        needs_weights=False,
    )
    compiled = _compile(config, loaded, max_model_len, max_num_tokens, store, anew=anew, on_phase=on_phase)
    if head is not None:
        with naming_the_head():
            of_head = replace(config, source=head.source, is_draft=True, may_raise_block_size=False)
            stand_in = head_without_weights(head, loaded.config, loaded.dtype, loaded.device)
            made = _compile(of_head, stand_in, max_model_len, max_num_tokens, store, anew=anew, on_phase=on_phase)
        return replace(compiled, draft=made)
    if draft is None:
        return compiled
    with naming_the_draft():
        of_draft = draft.stand_in if draft.stand_in is not None else load_without_weights(draft.config, on_phase)
        made = _compile(draft.config, of_draft, max_model_len, max_num_tokens, store, anew=anew, on_phase=on_phase)
    return replace(compiled, draft=made)


def _compile(
    config: EngineConfig,
    loaded: LoadedModel,
    max_model_len: int,
    max_num_tokens: int,
    store: Store,
    *,
    anew: bool,
    on_phase: OnPhase | None,
) -> CompiledAhead:
    """Put one model, `loaded` without weights, into `store`; see `compile_ahead`."""
    decided: list[Decided] = []

    def decide(calls: tuple[SplitCall, ...]) -> None:
        decided.append(decide_for(calls, loaded, config, max_model_len, max_num_tokens))

    module = loaded.forward_module()
    compile = options_on(config, loaded.device.type)
    cache = CompileCache(store, True, reads=not anew)
    keep_cpu_kernels(config.quantization, loaded.config, loaded.device.type, cache)
    inputs, dims = loaded.example_inputs(loaded.device), loaded.dynamic_dims
    with torch.no_grad():
        plans = PlanStore.of(cache, module, ExampleCall.of(module, inputs, {}, dims), compile)
        if plans.key is None:
            raise KeyFactorError(f"this model cannot be cached: {plans.reason}")
        report = load_or_compile(
            module,
            inputs,
            {},
            dims,
            compile,
            on_phase=on_phase or (lambda phase: None),
            before_compile=decide,
            cache=cache,
        ).built.report
        if compiles_kernels(loaded.device):
            with timed_phase(on_phase, "kernels"):
                compile_step_kernels(decided[-1], loaded, max_model_len, max_num_tokens)
                why_not = OWN_KERNELS.save()
            if why_not:
                raise CacheError(f"the model's kernels were compiled, but could not be stored: {why_not}")
    if report.cache.not_stored:
        raise CacheError(f"the model was compiled, but could not be stored: {report.cache.not_stored}")
    not_done = ("selfcheck: it runs the model, which only a start does",) if config.compile.selfcheck else ()
    return CompiledAhead(
        key=plans.key,
        was_cached=report.cache.state == "hit",
        report=report,
        notes=(*loaded.notes, *cpu_kernels_notes(loaded.device.type), *not_done),
    )
