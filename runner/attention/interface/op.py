"""The ops at which a model's graph is split: `piecegraph::attention`, and other forms of it.

Each writes this step's keys and values into the paged cache, attends, and writes the result into `out`, a buffer of the
caller's (`op_call.AttentionCall`). `piecegraph::rope_attention` takes query and key before their norm and rotary
embedding and applies both; the pass `fuse-rope-kv-write` puts it into graphs. `piecegraph::latent_attention` takes one
key for all heads, which begins with the value (`latent`). In `piecegraph::chunked_attention` a query sees the keys of
its own chunk; in `piecegraph::biased_attention` a bias by position is added to its scores. All are defined through
`torch.library.Library` (a call costs 3-4 us, one of a `custom_op` 23-40) and always called as `.default`: dead-code
elimination drops calls of the overload packet, mutating or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piecegraph.compiler.graphs.replay.prepared_ops import Launch, Patch, PatchableLaunch, register_prepare
from piecegraph.runner.attention.interface.forward_context import get_forward_context
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import (
    ATTENTION_OP,
    BIASED_ATTENTION_OP,
    CHUNKED_ATTENTION_OP,
    LATENT_ATTENTION_OP,
    ROPE_ATTENTION_OP,
    SCHEMAS,
    AttentionCall,
    attention_call,
    biased_attention_call,
    chunked_attention_call,
    latent_attention_call,
    rope_attention_call,
)


def _run(call: AttentionCall) -> None:
    assert call.unsupported is None, call.unsupported
    context = get_forward_context()
    context.impl.forward(call, context.kv_caches[call.layer], context.metadata_of(call.layer))


def _prepare(call: AttentionCall) -> Launch | str:
    """Bind a layer of a PIECEWISE bucket to its buffers and its cache, by the backend of the capture."""
    assert call.unsupported is None, call.unsupported
    context = get_forward_context()
    launch = context.impl.prepare(call, context.kv_caches[call.layer])
    if isinstance(launch, str) or not context.group_metadata:
        return launch
    return launch_of_group(launch, context.group_of[call.layer])


def launch_of_group(launch: Launch, group: int) -> Launch:
    """Return a launch that takes the metadata of all groups and gives `launch` that of `group`.

    The result can be part of a graph (`PatchableLaunch`) if `launch` can.
    """
    if isinstance(launch, PatchableLaunch):
        return _PatchableGroupLaunch(launch, group)
    return lambda groups: launch(groups[group])


class _PatchableGroupLaunch:
    def __init__(self, launch: PatchableLaunch, group: int) -> None:
        self._launch = launch
        self._group = group

    def __call__(self, groups: tuple[AttentionMetadata, ...]) -> None:
        self._launch(groups[self._group])

    def unpatchable_reason(self) -> str | None:
        return self._launch.unpatchable_reason()

    def record(self, groups: tuple[AttentionMetadata, ...]) -> Patch:
        patch, group = self._launch.record(groups[self._group]), self._group
        return lambda graph_exec, groups: patch(graph_exec, groups[group])


def launch_prepared(call: AttentionCall) -> None:
    """Bind `call` as a capture would and launch it once with the current metadata.

    Its kernels are compiled then, for any batch of as many rows. Does nothing where the backend prepares no such call.
    """
    launch = _prepare(call)
    if not isinstance(launch, str):
        launch(_metadata_of_launches())


def _kind(*args: Any) -> tuple[Any, ...]:
    """Return what distinguishes layers that take different kernels, or pass them other numbers or tensors.

    That is every argument of the op but the last, the layer's name, and then the cache and the group found under it.
    """
    context = get_forward_context()
    *arguments, layer = args
    kv_cache = context.kv_caches[layer]
    scales = () if kv_cache.scales is None else kv_cache.scales.tensors().values()
    return (*arguments, kv_cache.key, kv_cache.value, *scales, context.group_of.get(layer))


def _metadata_of_launches() -> AttentionMetadata | tuple[AttentionMetadata, ...]:
    """Return the metadata of all layers, read once a replay; with several groups, a launch picks that of its own."""
    context = get_forward_context()
    return context.group_metadata or context.metadata


_library = torch.library.Library("piecegraph", "FRAGMENT")


def _register(op: str, schema: str, call_of: Callable[..., AttentionCall]) -> None:
    def run(*args: Any) -> None:
        _run(call_of(*args))

    def prepare(*args: Any) -> Launch | str:
        return _prepare(call_of(*args))

    _library.define(schema)
    _library.impl(op.partition("::")[2], run, "CompositeExplicitAutograd")
    torch.library.register_fake(op, lambda *args: None, lib=_library)
    register_prepare(op, prepare, _metadata_of_launches, _kind)


_register(ATTENTION_OP, SCHEMAS[0], attention_call)
_register(ROPE_ATTENTION_OP, SCHEMAS[1], rope_attention_call)
_register(LATENT_ATTENTION_OP, SCHEMAS[2], latent_attention_call)
_register(CHUNKED_ATTENTION_OP, SCHEMAS[3], chunked_attention_call)
_register(BIASED_ATTENTION_OP, SCHEMAS[4], biased_attention_call)
