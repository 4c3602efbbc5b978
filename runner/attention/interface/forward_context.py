"""The forward context: the ambient value that the attention ops, and the ops of adapters, read in a step.

A piece passes tensors only, so the split op between pieces cannot be handed this step's metadata; it reads the
context instead. The context is global state: nothing but these ops reads it, entering does nothing but set it,
and nesting is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.attention.interface.backend import AttentionImpl
    from piecegraph.runner.attention.interface.kv_cache import KVCache, StateCache
    from piecegraph.runner.attention.interface.metadata import AttentionMetadata


class StepContext:
    """The base of what the split ops of one kind of model read in a step."""

    __slots__ = ()


class LoraRows:
    """The slots of the adapters of a step's rows, views of buffers at fixed addresses; -1: the row has no adapter."""

    __slots__ = ("_groups", "logits", "tokens")

    def __init__(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        self.tokens = tokens  # [num_tokens] int32
        self.logits = logits  # [num_logits] int32
        self._groups: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}

    def groups(self, kind: str, num_rows: int) -> Sequence[tuple[int, torch.Tensor]]:
        """Return each slot in the first `num_rows` rows of a kind ("tokens", "logits") with the indices of its rows.

        Reads the tensors at the first call, once for all layers of a step; for the CPU only.
        """
        found = self._groups.get((kind, num_rows))
        if found is None:
            slots = (self.logits if kind == "logits" else self.tokens)[:num_rows]
            assert slots.shape[0] == num_rows, f"{num_rows} rows of {kind}, and the slots of {slots.shape[0]}"
            found = [(slot, (slots == slot).nonzero()[:, 0]) for slot in sorted(set(slots.tolist())) if slot >= 0]
            self._groups[kind, num_rows] = found
        return found


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current.set(None)


def clear_forward_context() -> None:
    """Clear the context that a step left behind when it was interrupted. Idempotent."""
    _current.set(None)


def get_forward_context() -> ForwardContext:
    """Return the current context. Only the ops of attention and of layers with states may call this."""
    context = _current.get()
    assert isinstance(context, ForwardContext), "piecegraph::attention ran outside of set_forward_context"
    return context


def current_context() -> StepContext | None:
    """Return the current context, of whatever kind, or None. Only ops without a cache may call this."""
    return _current.get()
