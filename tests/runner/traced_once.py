"""Traces that the tests of the runner share: a model of the same config is traced once in a process.

The cache keeps no plans of eager pieces, so every `LLM` of a tiny model would be traced again, which takes longer than
everything else about it. What may be shared is decided as the cache decides it: by the key of a plan, and then by every
value that the trace read. Where Inductor compiles, nothing is shared: a compile adds to what is known of the sizes.
Threads share only with earlier threads of their name: the examples of a trace belong to one mode for fake tensors,
which two threads, as the ranks of an `LLM` in threads are, may not use at the same time.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from piecegraph.cache.store.keys import key_of, plain
from piecegraph.compiler import load_or_compile
from piecegraph.compiler.building import cold_start
from piecegraph.compiler.piece_compilers.graphs_first import GraphsFirst
from piecegraph.compiler.plans.plan_factors import plan_factors
from piecegraph.compiler.tracing.dynamic_dims import DynamicDims
from piecegraph.compiler.tracing.signature import BoundInput, ExampleCall
from piecegraph.compiler.tracing.trace import Traced, trace
from piecegraph.compiler.tracing.traced_reads import find_changed_read
from piecegraph.config import CompileConfig
from piecegraph.errors import KeyFactorError
from tests.compiler.later_compiler import LaterCompiler


@contextmanager
def shared_traces() -> Iterator[dict[str, Traced]]:
    """Let models with eager pieces that are compiled inside this block share traces; yield those kept, by key."""
    kept: dict[str, Traced] = {}
    own_cold_start = cold_start.cold_start
    shares = threading.local()

    def shared(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dims: DynamicDims) -> Traced:
        if not getattr(shares, "in_this_start", False):
            return trace(module, args, kwargs, dims)
        key = trace_key(module, ExampleCall.of(module, args, kwargs, dims))
        found = kept.get(key)
        if found is not None and may_share(found, module):
            return for_module(found, module)
        made = trace(module, args, kwargs, dims)
        if key and is_shareable(made):
            kept[key] = without_weights(made)
        return made

    def start(
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dims: DynamicDims,
        config: CompileConfig,
        *others: Any,
        **options: Any,
    ) -> cold_start.ColdStart:
        shares.in_this_start = config.compiler == "eager" or (bool(others) and _is_compiled_by_a_test(others[0]))
        try:
            return own_cold_start(module, args, kwargs, dims, config, *others, **options)
        finally:
            shares.in_this_start = False

    with patch.object(load_or_compile, "cold_start", start), patch.object(cold_start, "trace", shared):
        yield kept


def _is_compiled_by_a_test(compiler: object) -> bool:
    """Return whether graphs run until a compiler of a test, which is not Inductor, has pieces for them."""
    return isinstance(compiler, GraphsFirst) and isinstance(getattr(compiler._start, "__self__", None), LaterCompiler)


def trace_key(module: nn.Module, call: ExampleCall) -> str:
    """Return the key of a plan with the default config and the thread's name, or "" where no key can be made.

    A model without weights has another key than the one with them: that their traces are equal is a promise.
    """
    is_fake = any(isinstance(each, FakeTensor) for each in module.parameters())
    try:
        key = key_of(plain(plan_factors(module, call, CompileConfig())))
    except KeyFactorError:
        return ""
    return f"{key} {is_fake} {threading.current_thread().name}"


def is_shareable(made: Traced) -> bool:
    """Return whether all that the trace depends on is known, and every tensor it reads is found in a module by name."""
    bound = [each for each in made.inputs if isinstance(each, BoundInput)]
    results = [what for kind, what in made.result_spec.sources if kind == "bound"]
    return not made.reads.not_comparable and not results and all(each.kind != "constant" for each in bound)


def may_share(found: Traced, module: nn.Module) -> bool:
    """Return whether a trace of `module` would read what the trace `found` read."""
    changed, _ = find_changed_read(found.reads.places, found.reads.facts, found.reads.identities, module)
    return changed is None


def without_weights(made: Traced) -> Traced:
    """Return a copy that keeps no tensor of the module alive."""
    nothing = torch.empty(0)
    inputs = tuple(replace(each, tensor=nothing) if isinstance(each, BoundInput) else each for each in made.inputs)
    return replace(made, graph_module=copied(made.graph_module), inputs=inputs)


def for_module(found: Traced, module: nn.Module) -> Traced:
    """Return the trace with a graph of its own, bound to the tensors of `module`."""
    inputs = tuple(
        BoundInput.of(module, each.kind, each.name) if isinstance(each, BoundInput) else each for each in found.inputs
    )
    return replace(found, graph_module=copied(found.graph_module), inputs=inputs, seconds=0.0)


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose nodes may be changed; the examples in their `meta` are shared."""
    return copy.deepcopy(graph_module)
