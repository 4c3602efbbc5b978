"""What `LLM` would compile, compiled for the cache alone: from the model's config, without weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from piecegraph.cache.store import Store
from piecegraph.compiler.plan import SplitCall
from piecegraph.compiler.report import CompileReport
from piecegraph.compiler.start import start
from piecegraph.compiler.stored.cache_choice import what_is_kept
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.own_kernels import OWN_KERNELS
from piecegraph.compiler.stored.plan_store import PlanStore
from piecegraph.compiler.trace import ExampleCall
from piecegraph.errors import CacheError, CompileError, ConfigError, KeyFactorError
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.attention.select import check_backend_name
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.decide import Decided, compile_step_kernels, decide_for
from piecegraph.runner.engine_config import EngineConfig, batched_tokens, static_sizes
from piecegraph.runner.model_length import model_length
from piecegraph.runner.step_kernels import compiles_kernels
from piecegraph.runner.without_weights import load_without_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledAhead:
    """A model in the cache."""

    key: str  # of its plan
    was_there: bool  # nothing had to be compiled
    report: CompileReport
    notes: tuple[str, ...]


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
    """Have in `store` what an `LLM` with this config, its weights and this very machine would look for.

    `anew`: compile all of it again, whatever is there.

    Raises what `LLM` would for the model and the config; `CompileError` for a device that is not here; `ConfigError`
    for a config, or an environment, by which nothing is kept, and for a model of which no key can be made;
    `CacheError` for what was compiled and could not be stored.
    """
    check_backend_name(config.attention_backend)
    check_can_compile_for(config.device)
    keeps, reason = what_is_kept(config.compile)
    if keeps is not True:
        raise ConfigError(f"there is nothing to fill a cache with: {reason}. Leave that setting out.")
    loaded = load_without_weights(config, on_phase)
    max_model_len = model_length(loaded.config, config.max_model_len)
    max_num_tokens = batched_tokens(config, loaded.device.type)
    decided: list[Decided] = []

    def decide(calls: tuple[SplitCall, ...]) -> None:
        decided.append(decide_for(calls, loaded, config, max_model_len, max_num_tokens))

    module = CausalLMForward(loaded.model)
    compile = replace(config.compile, compile_sizes=static_sizes(config, is_cuda=loaded.device.type == "cuda"))
    cache = CompileCache(store, True, reads=not anew)
    inputs = example_inputs(loaded.device)
    with torch.no_grad():
        plans = PlanStore.of(cache, module, ExampleCall.of(module, inputs, {}, DYNAMIC_DIMS), compile)
        if plans.key is None:
            raise KeyFactorError(f"nothing of this model can be kept: {plans.reason}")
        report = start(
            module,
            inputs,
            {},
            DYNAMIC_DIMS,
            compile,
            on_phase=on_phase or (lambda phase: None),
            before_compile=decide,
            cache=cache,
        ).built.report
        if compiles_kernels(loaded.device):
            with timed_phase(on_phase, "kernels"):
                compile_step_kernels(decided[-1], loaded, config, max_model_len, max_num_tokens)
                why_not = OWN_KERNELS.keep()
            if why_not:
                raise CacheError(f"the model's kernels were compiled, and are not in the cache: {why_not}")
    if report.cache.not_stored:
        raise CacheError(f"the model was compiled, and is not in the cache: {report.cache.not_stored}")
    not_done = ("selfcheck: it runs the model, which a start does",) if config.compile.selfcheck else ()
    return CompiledAhead(
        key=plans.key,
        was_there=report.cache.state == "hit",
        report=report,
        notes=(*loaded.notes, *not_done),
    )
