"""Prompt embeddings: the rows of a step's batch that are given as embeddings, and the model that runs over them.

A step that computes a token of such a prompt runs the model's own code over embeddings instead of the compiled pieces;
all other steps are unaffected. Nothing is traced or compiled a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

import torch

from piecegraph.errors import ConfigError, RequestError
from piecegraph.runner.attention.interface.transformers_attention import POSITIONS_ARGUMENT, needs_positions
from piecegraph.runner.device_memory.host_memory.host_copy import to_device
from piecegraph.runner.scheduling.scheduler_output import AddedRequest, ScheduledRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from piecegraph.runner.common.sampling_params import SamplingParams

EmbedsForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "EmbedsBatch"], torch.Tensor]
"""The model over embeddings, `(input_ids, positions, logits_indices, embeds) -> logits`; rows in `embeds` replace the
embeddings of the ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedsBatch:
    """The rows of a step's batch that are given as embeddings."""

    rows: tuple[int, ...]
    chunks: tuple[torch.Tensor, ...]  # on the CPU, [num, embedding_size] each, for all `rows` in order

    def put_into(self, embeds: torch.Tensor) -> None:
        """Replace the rows `rows` of `embeds` `[num_tokens, embedding_size]` by the given embeddings."""
        given = torch.cat([chunk.to(embeds.dtype) for chunk in self.chunks]).to(embeds.device)
        embeds[to_device(self.rows, torch.int64, embeds.device)] = given


class PromptEmbedsStates:
    """The prompt embeddings of running requests that are not computed yet; usually empty."""

    def __init__(self) -> None:
        self._embeds: dict[str, torch.Tensor] = {}  # by request: [num_prompt_tokens, embedding_size]

    def add(self, added: AddedRequest) -> None:
        """Keep the embeddings of an added request, if it has any."""
        if added.prompt_embeds is not None:
            self._embeds[added.request_id] = added.prompt_embeds

    def remove(self, request_id: str) -> None:
        """Drop a request's embeddings, if it has any."""
        self._embeds.pop(request_id, None)

    def clear(self) -> None:
        """Drop all embeddings."""
        self._embeds.clear()

    def batch(self, scheduled: Sequence[ScheduledRequest]) -> EmbedsBatch | None:
        """Return the rows of a step that are given as embeddings, or None. Embeddings are dropped once computed."""
        if not self._embeds:
            return None
        rows: list[int] = []
        chunks: list[torch.Tensor] = []
        first = 0
        for item in scheduled:
            embeds = self._embeds.get(item.request_id)
            if embeds is not None:
                end = item.num_computed_tokens + item.num_tokens
                chunk = embeds[item.num_computed_tokens : end]
                if len(chunk):
                    rows += range(first, first + len(chunk))
                    chunks.append(chunk)
                if end >= len(embeds):
                    del self._embeds[item.request_id]
            first += item.num_tokens
        return EmbedsBatch(rows=tuple(rows), chunks=tuple(chunks)) if rows else None


def embedding_size(model: PreTrainedModel) -> int:
    """Return the size of the model's embeddings. Raises `ConfigError` if the model takes no embeddings."""
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if "inputs_embeds" not in signature(model.forward).parameters or weight is None:
        raise ConfigError(f"enable_prompt_embeds=True, but {type(model).__name__} takes no embeddings; leave it out.")
    return int(weight.shape[-1])


def embeds_forward(model: PreTrainedModel, first_position: int) -> EmbedsForward:
    """Return a function that runs `model` over embeddings, with positions counted from `first_position`."""
    embedding, hands_on_positions = model.get_input_embeddings(), needs_positions(model)

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor, embeds: EmbedsBatch
    ) -> torch.Tensor:
        inputs = embedding(input_ids)
        embeds.put_into(inputs)
        output = model(
            inputs_embeds=inputs[None],
            position_ids=(positions + first_position)[None],
            use_cache=False,
            logits_to_keep=logits_indices,
            **({POSITIONS_ARGUMENT: positions[None]} if hands_on_positions else {}),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    return forward


def check_prompt_embeds(embeds: torch.Tensor, params: SamplingParams, size: int | None) -> None:
    """Raise `RequestError` unless `embeds` can be a prompt.

    `size`: the size of the model's embeddings; None: prompt embeddings were not enabled.
    """
    if size is None:
        raise RequestError("the prompt has prompt_embeds; make the LLM with enable_prompt_embeds=True to allow them.")
    if embeds.shape[1] != size:
        raise RequestError(f"prompt_embeds has rows of {embeds.shape[1]} numbers; the model's embeddings have {size}.")
    if not bool(torch.isfinite(embeds).all()):
        raise RequestError("prompt_embeds has infinite or NaN values; all must be finite.")
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs belong to a prompt's tokens, and prompt_embeds has none; leave them out.")
    if params.truncate_prompt_tokens is not None:
        raise RequestError("truncate_prompt_tokens cuts tokens, and prompt_embeds has none; cut its rows.")
    if params.repetition_penalty != 1.0:
        raise RequestError(
            "repetition_penalty counts the tokens of the prompt, and prompt_embeds has none; use presence_penalty or "
            "frequency_penalty."
        )
