"""What an attention backend is: its capabilities, how it prepares a step, and how it attends."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch

from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.rotary import Rotary
from piecegraph.runner.kv_cache import KVCache


class AttentionCGSupport(enum.IntEnum):
    """Which batches a backend's kernels may be captured for inside a full CUDA graph. Each includes those before it."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2  # the same number of tokens for every request
    ALWAYS = 3


class AttentionMetadataBuilder(Protocol):
    """Turns a step's batch into what the impl reads; owns the fixed buffers its kernels work in."""

    def build(self, common: AttentionMetadata) -> AttentionMetadata:
        """This step's metadata, shared by all layers. Attention runs between graphs, or without any."""

    def init_capture(self, common: AttentionMetadata) -> AttentionMetadata:
        """The metadata a FULL graph is captured with. `common` holds the fixed buffers of one bucket;
        grids and everything else a graph freezes are chosen here, right for any lengths at replay."""

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        """Refill buffers of the builder's own, in place, from those of `captured`, which are refilled
        already. Allocates nothing, waits for nothing."""


class AttentionImpl(Protocol):
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rotary: Rotary | None = None,
    ) -> None:
        """One layer. Writes `key` and `value` into `kv_cache` by slot, then `out`. Shapes: `op_call.AttentionCall`.

        With `rotary`, query and key are normed and rotated on the way: the cache gets rotated keys, and rows of
        `query` may be overwritten (once a call: a row that is rotated in place is read rotated).
        """

    def prepare(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
        kv_cache: KVCache,
        rotary: Rotary | None = None,
    ) -> Callable[[AttentionMetadata], None] | str:
        """`forward` over tensors that stay where they are, for a step's metadata; or why there is none."""


class AttentionBackend(ABC):
    """One implementation of attention; `name` is what `attention_backend` calls it."""

    name: ClassVar[str]
    cudagraph_support: AttentionCGSupport
    needs_host_batch: ClassVar[bool] = False  # `AttentionMetadata.host` must be filled
    patches_graphs: ClassVar[bool] = False  # what `prepare` returns can be part of a CUDA graph (`PatchableLaunch`)

    @abstractmethod
    def layers_unsupported_reason(self, layers: Sequence[AttentionLayer], block_size: int) -> str | None:
        """Why these layers, over blocks of `block_size` tokens, cannot run on a GPU that has all this backend
        needs, or None. Asks no device: it may not be here."""

    @abstractmethod
    def unsupported_reason(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> str | None:
        """Why these layers cannot run on this device with this backend, or None."""

    def fitted(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> AttentionBackend:
        """This backend as it runs these layers, for which `unsupported_reason` was None; a device that is not
        here stands for any that has all this backend needs."""
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """What a fitted backend chose, and why: for `explain`."""
        return ()

    def kernel_block_size(self, block_size: int) -> int:
        """Tokens of a block as the kernels of this fitted backend take it, where blocks of `block_size` are
        allocated, which is a multiple: they then see several smaller blocks in place of each. The metadata
        builder, its batches and the caches have blocks of this size; all other questions are about `block_size`.
        """
        return block_size

    @abstractmethod
    def metadata_builder(
        self, layers: Sequence[AttentionLayer], block_size: int, device: torch.device, *, max_num_reqs: int
    ) -> AttentionMetadataBuilder:
        """One builder serves all layers and all graphs; `max_num_reqs` bounds what it allocates."""

    @abstractmethod
    def impl(self) -> AttentionImpl: ...
