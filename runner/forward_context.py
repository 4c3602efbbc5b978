"""The one ambient value: what our attention reads in a step.

A piece passes tensors only, so the split op between pieces cannot be handed this step's metadata; it
looks here instead. This is global state, and the only one: nothing but the attention op reads it,
entering does nothing but set it, and nesting is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecegraph.runner.attention.backend import AttentionImpl
    from piecegraph.runner.attention.metadata import AttentionMetadata
    from piecegraph.runner.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """What one forward pass of the model runs under."""

    impl: AttentionImpl
    metadata: AttentionMetadata  # of all layers, or of the first group of them
    kv_caches: Mapping[str, KVCache]  # by the layer's name
    group_metadata: tuple[AttentionMetadata, ...] = ()  # of each group of layers; empty: there is one
    group_of: Mapping[str, int] = field(default_factory=dict)  # by the layer's name; read if there are several
    cudagraph_mode: str = "NONE"  # how this step runs; set by the dispatcher once there are graphs
    descriptor: object | None = None  # the batch descriptor it was dispatched to

    def metadata_of(self, layer: str) -> AttentionMetadata:
        """What the layer of that name reads of the batch."""
        return self.group_metadata[self.group_of[layer]] if self.group_metadata else self.metadata


_current: ContextVar[ForwardContext | None] = ContextVar("piecegraph_forward_context", default=None)


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one; it ends with the block, also when the block raises."""
    assert _current.get() is None, "a forward pass is already running in this thread; forward contexts do not nest"
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The current context. Only the attention op may ask."""
    context = _current.get()
    assert context is not None, "piecegraph::attention ran outside of set_forward_context"
    return context
