"""One pooling step over fixed buffers: hidden states of a flattened batch, and one row per text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.runner.attention.interface.forward_context import set_forward_context
from piecegraph.runner.attention.varlen.call import VarlenAttention, VarlenMetadata
from piecegraph.runner.attention.varlen.op import VarlenContext
from piecegraph.runner.device_memory.host_memory.host_copy import to_device
from piecegraph.runner.pooling.pool import PoolingType, pool

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text as the model takes it."""

    token_ids: Sequence[int]
    token_type_ids: Sequence[int] | None = None  # None: all 0


class PoolingBuffers:
    """The input tensors of all steps, at fixed addresses. The host writes them, with a copy of each per batch.

    `uncounted_token`: see `FirstPosition`.
    """

    def __init__(
        self, *, max_num_tokens: int, max_num_reqs: int, device: torch.device, uncounted_token: int | None = None
    ) -> None:
        self.uncounted_token = uncounted_token
        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.token_type_ids = torch.zeros_like(self.input_ids)
        self.query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)

    def fill(self, texts: Sequence[Text], num_tokens: int) -> VarlenMetadata:
        """Write a batch, padded to `num_tokens`, and return its metadata. Texts after the last one are empty."""
        seq_lens = tuple(len(text.token_ids) for text in texts)
        starts = [*accumulate(seq_lens, initial=0)]
        real = starts[-1]
        assert real <= num_tokens <= self.max_num_tokens, (real, num_tokens, self.max_num_tokens)
        assert len(texts) <= self.max_num_reqs, (len(texts), self.max_num_reqs)
        padding = [0] * (num_tokens - real)
        columns = (
            [token for text in texts for token in text.token_ids],
            [position for text in texts for position in positions_of(text.token_ids, self.uncounted_token)],
            [kind for text in texts for kind in text.token_type_ids or [0] * len(text.token_ids)],
        )
        device = self.input_ids.device
        for buffer, values in zip((self.input_ids, self.positions, self.token_type_ids), columns, strict=True):
            buffer[:num_tokens].copy_(to_device([*values, *padding], torch.int64, device), non_blocking=True)
        starts += [real] * (self.max_num_reqs - len(texts))
        self.query_start_loc.copy_(to_device(starts, torch.int32, device), non_blocking=True)
        return VarlenMetadata.of(seq_lens, self.query_start_loc[: len(texts) + 1], num_tokens)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers with names."""
        names = ("input_ids", "positions", "token_type_ids", "query_start_loc")
        return [(f"input buffer {name}", getattr(self, name)) for name in names]


def positions_of(token_ids: Sequence[int], uncounted_token: int | None) -> Sequence[int]:
    """Return the positions of a text's tokens from 0 on; the token that is not counted has -1 wherever it is."""
    if uncounted_token is None or uncounted_token not in token_ids:
        return range(len(token_ids))
    is_counted = [token != uncounted_token for token in token_ids]
    return [number - 1 if counts else -1 for number, counts in zip(accumulate(is_counted), is_counted, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingStep:
    """The compiled model, what turns its hidden states into rows, and the buffers that it reads."""

    compiled: CompiledModel
    attention: VarlenAttention
    pooling: tuple[PoolingType, ...]
    head: nn.Module | None  # from pooled rows to embeddings or logits; None: the rows themselves
    buffers: PoolingBuffers

    def model_inputs(self, num_tokens: int) -> Inputs:
        """Return the model's arguments, views of the fixed buffers."""
        buffers = self.buffers
        return buffers.input_ids[:num_tokens], buffers.positions[:num_tokens], buffers.token_type_ids[:num_tokens]

    def context(self, metadata: VarlenMetadata) -> set_forward_context:
        """Return the forward context of a step."""
        return set_forward_context(VarlenContext(attention=self.attention, metadata=metadata))

    def num_rows(self, num_tokens: int) -> int:
        """Return the number of texts that a batch of `num_tokens` can hold."""
        return min(num_tokens, self.buffers.max_num_reqs)

    def pool(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return a row of float32 for each text that the batch can hold; those of empty texts are undefined."""
        num_tokens = hidden_states.shape[0]
        bounds = self.buffers.query_start_loc[: self.num_rows(num_tokens) + 1]
        rows = pool(hidden_states, bounds, self.pooling)
        return rows if self.head is None else self.head(rows)

    def token_rows(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return a row of float32 for each token, as if each were pooled alone."""
        rows = hidden_states.float()
        return rows if self.head is None else self.head(rows)

    def hidden_states(self, metadata: VarlenMetadata) -> torch.Tensor:
        """Run the pieces on the prepared inputs without graphs."""
        with self.context(metadata):
            found: torch.Tensor = self.compiled(*self.model_inputs(metadata.num_tokens))
        return found

    def dummy_batch(self, descriptor: BatchDescriptor, max_model_len: int) -> VarlenMetadata:
        """Fill the buffers with a batch for warm-up and capture: as few texts as can hold its tokens."""
        count = descriptor.num_tokens
        lens = [max_model_len] * (count // max_model_len) + ([count % max_model_len] if count % max_model_len else [])
        lens = lens[: self.buffers.max_num_reqs]
        return self.buffers.fill([Text(token_ids=[0] * seq_len) for seq_len in lens], count)
