"""The compiler's front door: `piecegraph.compile`, and the models behind `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecegraph.compiler.backend import GraphModel, graph_models_of
from piecegraph.compiler.build import BeforeCompile
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.dynamic_dims import DynamicDims
from piecegraph.compiler.late_weights import LoadWeights
from piecegraph.config import CompileConfig
from piecegraph.errors import UsageError
from piecegraph.progress import OnPhase


def compile(
    module: torch.nn.Module,
    config: CompileConfig | None = None,
    *,
    dynamic_dims: DynamicDims | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    on_phase: OnPhase | None = None,
    before_compile: BeforeCompile | None = None,
    load_weights: LoadWeights | None = None,
) -> CompiledModel:
    """Compile `module` for inference, its graph cut at `config.split_ops`.

    `dynamic_dims`: argument name (a nested one by path, `"xs[0]"`) to `{dim: size name}`; dims of one
    name are equal in every call, different names vary freely; `{"x": 0}` is short for
    `{"x": {0: "num_tokens"}}`. A dim not named is fixed to its example's size.

    `example_inputs`: positional arguments as a sequence, or keyword arguments as a mapping. Shapes,
    dtypes and devices are read, values are not. Without them, tracing waits for the first call.

    The module stays usable; with `config.passes` its parameters may become views of tensors that hold
    several of them (`merge-projections`), their values unchanged.

    `on_phase` is told of trace, passes, split, compile, compile_sizes, tune_sizes and stitch, and over a cache of
    cache_key, look_up and store, or import_loader, load_compiled and bind_weights; `before_compile` is shown every call
    of a split op before any piece compiles, and may raise.

    `load_weights`: `module` is a stand-in whose parameters and buffers are fake tensors
    (`torch._subclasses.fake_tensor`), and this gives the same module with its weights. It is called once, in this
    thread: while pieces compile in processes of their own, or at once where the cache has the model. What it gives is
    what is bound, and may have its parameters become views. Without it, a module of fake tensors can be compiled for
    the cache, and not called.

    Raises `GraphBreak`, `SizeSpecialized`, `UnknownGuard`, `SplitOpNotFound`, `SplitOpUnused`,
    `PieceCompileFailed`, `ConfigError` and `InputMismatch` (see `piecegraph.errors`).
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"piecegraph.compile takes a torch.nn.Module, not {type(module).__name__}. "
            "For a function, use torch.compile(fn, backend='piecegraph')."
        )
    model = CompiledModel(module, config or CompileConfig(), dynamic_dims or {}, on_phase, before_compile, load_weights)
    if isinstance(example_inputs, Mapping):
        model.compile_for((), example_inputs)
    elif example_inputs is not None:
        model.compile_for(tuple(example_inputs), {})
    return model


def compiled_models(function: Callable[..., Any] | torch.nn.Module) -> tuple[GraphModel, ...]:
    """What `torch.compile(..., backend="piecegraph")` compiled for `function`, oldest first.

    `function` is what `torch.compile` returned. Empty before the first call.
    """
    return graph_models_of(function)
