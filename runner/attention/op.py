"""`piecegraph::attention`: the op a model's graph is cut at; and `piecegraph::rope_attention`, the wider form of it.

It writes this step's keys and values into the paged cache, attends, and writes the result into `out`,
a buffer of its caller's (`op_call.AttentionCall`). The wider form is given query and key before their norm and rotary
embedding, and does both on the way; the pass `fuse-rope-kv-write` puts it into graphs. Both are defined through
`torch.library.Library` (a call costs 3-4 us, `custom_op` 23-40) and always called as `.default`: dead-code
elimination drops the overload packet, mutating or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piecegraph.compiler.graphs.prepared_ops import Launch, register_prepare
from piecegraph.runner.attention.group_launch import launch_of_group
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.op_call import (
    ATTENTION_OP,
    ROPE_ATTENTION_OP,
    SCHEMAS,
    AttentionCall,
    attention_call,
    rope_attention_call,
)
from piecegraph.runner.forward_context import get_forward_context


def _run(call: AttentionCall) -> None:
    assert call.unsupported is None, call.unsupported
    context = get_forward_context()
    context.impl.forward(
        call.query,
        call.key,
        call.value,
        call.out,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks,
        kv_cache=context.kv_caches[call.layer],
        metadata=context.metadata_of(call.layer),
        rotary=call.rotary,
    )


def _prepare(call: AttentionCall) -> Launch | str:
    """A layer of a PIECEWISE bucket bound to its buffers and its cache, by the backend of the capture."""
    assert call.unsupported is None, call.unsupported
    context = get_forward_context()
    launch = context.impl.prepare(
        call.query,
        call.key,
        call.value,
        call.out,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks,
        kv_cache=context.kv_caches[call.layer],
        rotary=call.rotary,
    )
    if isinstance(launch, str) or not context.group_metadata:
        return launch
    return launch_of_group(launch, context.group_of[call.layer])


def launch_prepared(call: AttentionCall) -> None:
    """Bind `call` as a capture would, and launch it once with the current metadata: its kernels are compiled then, for
    any batch of as many rows. Nothing where the backend prepares no such call."""
    launch = _prepare(call)
    if not isinstance(launch, str):
        launch(_metadata_of_launches())


def _kind(*args: Any) -> tuple[Any, ...]:
    """What tells layers apart that take different kernels, or give them other numbers or tensors: all of an op's
    arguments but the last, the name, and what is found under that."""
    context = get_forward_context()
    *arguments, layer = args
    kv_cache = context.kv_caches[layer]
    return (*arguments, kv_cache.key, kv_cache.value, context.group_of.get(layer))


def _metadata_of_launches() -> AttentionMetadata | tuple[AttentionMetadata, ...]:
    """Read once a replay, for all layers: where there are several groups, a launch picks its own's."""
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
    register_prepare(op, prepare, _metadata_of_launches, _kind, may_copy=True)


_register(ATTENTION_OP, SCHEMAS[0], attention_call)
_register(ROPE_ATTENTION_OP, SCHEMAS[1], rope_attention_call)
