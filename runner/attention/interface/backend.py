"""The interface of an attention backend: its capabilities, how it prepares a step, and how it attends."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch

from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall


class AttentionCGSupport(enum.IntEnum):
    """The batches for which a backend's kernels may be part of a FULL CUDA graph. Each value includes those before."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2  # the same number of tokens for every request
    ALWAYS = 3


class AttentionMetadataBuilder(Protocol):
    """A builder of what the impl reads of a step's batch. It owns the fixed buffers that the kernels work in."""

    def build(self, common: AttentionMetadata) -> AttentionMetadata:
        """Return this step's metadata, shared by all layers, for attention between graphs or without any."""

    def init_capture(self, common: AttentionMetadata) -> AttentionMetadata:
        """Return the metadata a FULL graph is captured with.

        `common` holds the fixed buffers of one bucket. Grids and everything else that a graph freezes are chosen here,
        valid for any lengths at replay.
        """

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        """Refill the builder's own buffers, in place, from those of `captured`, which are refilled already.

        Allocates nothing and waits for nothing.
        """


class AttentionImpl(Protocol):
    """The part of a backend that runs one layer's attention."""

    def forward(self, call: AttentionCall, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Run one layer: write `call.key` and `call.value` into `kv_cache` by slot, then write `call.out`.

        With `call.rotary`, query and key are normed and rotated first: the cache gets rotated keys, and rows of
        `call.query` may be overwritten (once a call: a row that is rotated in place is read rotated).
        """

    def prepare(self, call: AttentionCall, kv_cache: KVCache) -> Callable[[AttentionMetadata], None] | str:
        """Bind `forward` to tensors that keep their addresses.

        Returns a function that takes a step's metadata and runs the layer, or the reason why there is none.
        """


class AttentionBackend(ABC):
    """One implementation of attention; `name` is its value of the option `attention_backend`."""

    name: ClassVar[str]
    cudagraph_support: AttentionCGSupport
    needs_host_batch: ClassVar[bool] = False  # True: `AttentionMetadata.host` must be filled
    patches_graphs: ClassVar[bool] = False  # True: `prepare` returns launches that a CUDA graph can hold

    @abstractmethod
    def layers_unsupported_reason(self, layers: Sequence[AttentionLayer], block_size: int) -> str | None:
        """Return why these layers, over blocks of `block_size` tokens, cannot run on a GPU that has all this backend
        needs, or None. No device is asked: the machine may have none."""

    @abstractmethod
    def unsupported_reason(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> str | None:
        """Return why these layers cannot run on this device with this backend, or None."""

    def fitted(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> AttentionBackend:
        """Return this backend as it runs these layers, for which `unsupported_reason` was None.

        A device that this machine does not have stands for any that has all this backend needs.
        """
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """The choices of a fitted backend with their reasons, for `explain`."""
        return ()

    def kernel_block_size(self, block_size: int) -> int:
        """Return the tokens of a block as the kernels of this fitted backend take it.

        Blocks of `block_size`, a multiple of the result, are allocated; kernels see several smaller blocks in place of
        each. The metadata builder, its batches and the caches have blocks of the returned size; all other methods
        take the allocated `block_size`.
        """
        return block_size

    @abstractmethod
    def metadata_builder(
        self, layers: Sequence[AttentionLayer], block_size: int, device: torch.device, *, max_num_reqs: int
    ) -> AttentionMetadataBuilder:
        """Return a builder that serves all layers and all graphs; `max_num_reqs` bounds what it allocates."""

    @abstractmethod
    def impl(self) -> AttentionImpl:
        """Return an impl that serves all layers."""
