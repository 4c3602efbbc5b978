"""The forward context: the ambient value that the attention ops read in a step.

A piece passes tensors only, so the split op between pieces cannot be handed this step's metadata; it reads the
context instead. The context is global state: nothing but the attention op reads it, entering does nothing but set it
(and its `lora`, which the ops of adapters read), and nesting is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from piecegraph.passes.ops.lora import LoraRows, set_lora_rows

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.attention.interface.backend import AttentionImpl
    from piecegraph.runner.attention.interface.kv_cache import KVCache, StateCache
    from piecegraph.runner.attention.interface.metadata import AttentionMetadata


class StepContext:
    """The base of what the split ops of one kind of model read in a step."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext(StepContext):
    """The attention impl, metadata and caches of one forward pass of the model."""

    impl: AttentionImpl
    metadata: AttentionMetadata  # of all layers, or of the first group of them
    kv_caches: Mapping[str, KVCache]  # by the layer's name
    state_caches: Mapping[str, StateCache] = field(default_factory=dict)  # by the layer's name
    recent_states: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # see `recent_states`
    group_metadata: tuple[AttentionMetadata, ...] = ()  # of each group of layers; empty: there is one group
    group_of: Mapping[str, int] = field(default_factory=dict)  # by the layer's name; read if there are several groups
    cudagraph_mode: str = "NONE"  # how this step runs; set by the dispatcher once there are graphs
    descriptor: object | None = None  # the batch descriptor that the step was dispatched to
    lora: LoraRows | None = None  # None: no request of the step has an adapter

    def metadata_of(self, layer: str) -> AttentionMetadata:
        """Return the metadata of the layer of that name."""
        return self.group_metadata[self.group_of[layer]] if self.group_metadata else self.metadata


_current: ContextVar[StepContext | None] = ContextVar("piecegraph_forward_context", default=None)


class set_forward_context:  # noqa: N801  a verb: it is read as `with set_forward_context(...)`
    """Make `context` the current forward context until the block ends, also when the block raises.

    This is a class and not a generator: an interrupt while a generator is entered would leave a generator that ends the
    context of some later step whenever it is garbage-collected.
    """

    __slots__ = ("_context",)

    def __init__(self, context: StepContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        assert _current.get() is None, "a forward pass is already running in this thread; forward contexts do not nest"
        _current.set(self._context)
        if isinstance(self._context, ForwardContext) and self._context.lora is not None:
            set_lora_rows(self._context.lora)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        clear_forward_context()


def clear_forward_context() -> None:
    """Clear the context that a step left behind when it was interrupted. Idempotent."""
    _current.set(None)
    set_lora_rows(None)


def get_forward_context() -> ForwardContext:
    """Return the current context. Only the ops of attention and of layers with states may call this."""
    context = _current.get()
    assert isinstance(context, ForwardContext), "piecegraph::attention ran outside of set_forward_context"
    return context


def current_context() -> StepContext | None:
    """Return the current context, of whatever kind, or None. Only ops without a cache may call this."""
    return _current.get()
