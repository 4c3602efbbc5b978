"""The compiler's entry points: `piecegraph.compile`, and the models that `torch.compile` made through the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecegraph.compiler.backend import GraphModel, graph_models_of
from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.compiler.building.build import BeforeCompile
from piecegraph.compiler.building.deferred_weights import LoadWeights
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.tracing.dynamic_dims import DynamicDims
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
    background: BackgroundCompile | None = None,
    waits_for_others: bool = False,
) -> CompiledModel:
    """Compile `module` for inference, its graph cut at `config.split_ops`.

    `dynamic_dims` maps an argument name (a nested argument by path, `"xs[0]"`) to `{dim: size name}`. Dims of one
    size name are equal in every call; different size names vary independently. `{"x": 0}` is short for
    `{"x": {0: "num_tokens"}}`. A dim without a size name is fixed to the example's size.

    `example_inputs` holds positional arguments as a sequence, or keyword arguments as a mapping. Their shapes, dtypes
    and devices are read, their values are not. Without `example_inputs`, the first call traces and compiles.

    The module stays usable. With `config.passes` its parameters may become views of larger tensors that hold several
    parameters (`merge-projections`); the parameters' values do not change.

    `on_phase` is called for the phases trace, passes, split, compile, compile_sizes, tune_sizes and stitch, and, with a
    cache, for cache_key, look_up and store, or import_loader, load_compiled and bind_weights. `before_compile` receives
    every call of a split op before any piece is compiled, and may raise.

    `load_weights` is for a `module` whose parameters and buffers are fake tensors (`torch._subclasses.fake_tensor`): it
    returns the same module with its weights. It is called once, in this thread: while child processes compile pieces,
    or at once where the cache has the model. The returned module is the one that is bound, and its parameters may
    become views. Without `load_weights`, a module of fake tensors can be compiled into the cache but not called.

    With `background`, a new `BackgroundCompile`, this returns before the pieces are compiled, unless the cache has
    them: the model runs their graphs, and each compiled piece takes the place of its graph in `background.swap()`,
    which the caller calls between two calls of the model. `close` of the model ends the compile. It needs a module with
    its weights.

    `waits_for_others` says that `before_compile` waits for other processes that compile at the same time, as stages of
    a pipeline do. None of them waits for another's plan then, which would be a deadlock: each traces, and of each
    unique piece one compiles.

    Raises `GraphBreak`, `SizeSpecialized`, `UnknownGuard`, `SplitOpNotFound`, `SplitOpUnused`,
    `PieceCompileFailed`, `ConfigError` and `InputMismatch` (see `piecegraph.errors`).
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"piecegraph.compile takes a torch.nn.Module, not {type(module).__name__}. "
            "For a function, use torch.compile(fn, backend='piecegraph')."
        )
    model = CompiledModel(
        module,
        config or CompileConfig(),
        dynamic_dims or {},
        on_phase,
        before_compile,
        load_weights,
        background,
        waits_for_others=waits_for_others,
    )
    if isinstance(example_inputs, Mapping):
        model.compile_for((), example_inputs)
    elif example_inputs is not None:
        model.compile_for(tuple(example_inputs), {})
    return model


def compiled_models(function: Callable[..., Any] | torch.nn.Module) -> tuple[GraphModel, ...]:
    """Return the models that `torch.compile(..., backend="piecegraph")` compiled for `function`, oldest first.

    `function` is the object that `torch.compile` returned. The result is empty before the first call. Raises
    `UsageError` for any other object.
    """
    return graph_models_of(function)
