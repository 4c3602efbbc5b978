"""The modules that are compiled for the stages of a pipeline.

A stage that is not the first takes hidden states in place of token ids; one that is not the last takes no rows of
logits, and returns hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.transformers_attention import POSITIONS_ARGUMENT, needs_positions
from piecegraph.runner.pipeline_parallel.missing_module import MissingModule
from piecegraph.runner.pipeline_parallel.stage import Stage, StagePlan

_NUM_TOKENS = {0: "num_tokens"}


def stage_dims(stage: Stage) -> Mapping[str, Mapping[int, str]]:
    """Return the dynamic dims of the arguments of a stage's module."""
    dims = {"input_ids" if stage.is_first else "hidden_states": _NUM_TOKENS, "positions": _NUM_TOKENS}
    return {**dims, "logits_indices": {0: "num_logits"}} if stage.is_last else dims


def stage_inputs(
    plan: StagePlan, dtype: torch.dtype, example: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return inputs to trace a stage's module with, from those of a whole model."""
    tokens, positions, indices = example
    if not plan.stage.is_first:
        tokens = torch.zeros((tokens.shape[0], plan.hidden_size), dtype=dtype, device=tokens.device)
    return (tokens, positions, indices) if plan.stage.is_last else (tokens, positions)


def _one_batch(hidden_states: torch.Tensor) -> torch.Tensor:
    """Return `hidden_states` as a batch of one, `[1, num_tokens, hidden_size]`, a view.

    A view of a new shape has the strides of a new tensor. Those of `hidden_states[None]` are written in another way for
    a varying number of tokens, and by nothing else would pieces of this stage differ from those of the first.
    """
    return hidden_states.view(1, hidden_states.shape[0], hidden_states.shape[1])


class _Stage(nn.Module):
    """The base of stages over the flattened tokens of all requests, whose positions count from `first_position` on."""

    def __init__(self, model: Any, first_position: int) -> None:
        super().__init__()
        self.model = model
        self.first_position = first_position
        self.hands_on_positions = needs_positions(model)

    def call(self, module: Any, positions: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Call the model or its base model."""
        if self.first_position:
            positions = positions + self.first_position
        more = {POSITIONS_ARGUMENT: positions[None]} if self.hands_on_positions else {}
        return module(position_ids=positions[None], use_cache=False, **inputs, **more)


class FirstStage(_Stage):
    """The first stage, from token ids to hidden states."""

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
    ) -> torch.Tensor:
        """Return hidden states `[num_tokens, hidden_size]`. `positions` count from 0 in each request."""
        hidden: torch.Tensor = self.call(self.model.base_model, positions, input_ids=input_ids[None])[0]
        return hidden[0]


class MiddleStage(_Stage):
    """A stage from hidden states to hidden states."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        positions: torch.Tensor,  # [num_tokens] int64
    ) -> torch.Tensor:
        """Return hidden states `[num_tokens, hidden_size]`."""
        hidden: torch.Tensor = self.call(self.model.base_model, positions, inputs_embeds=_one_batch(hidden_states))[0]
        return hidden[0]


class LastStage(_Stage):
    """The last stage, from hidden states to logits of selected rows."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        positions: torch.Tensor,  # [num_tokens] int64
        logits_indices: torch.Tensor,  # [num_logits] int64
    ) -> torch.Tensor:
        """Return logits `[num_logits, vocab_size]`."""
        output = self.call(
            self.model, positions, inputs_embeds=_one_batch(hidden_states), logits_to_keep=logits_indices
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def stage_forward(model: Any, first_position: int, plan: StagePlan) -> nn.Module:
    """Return the module to compile for a stage of `model`, which `cut_to_stage` has cut."""
    stage = plan.stage
    kind = FirstStage if stage.is_first else LastStage if stage.is_last else MiddleStage
    return kind(model, first_position)


def check_passes_through(model: Any, plan: StagePlan) -> None:
    """Raise `UnsupportedModel` unless the base model hands hidden states from one layer to the next unchanged.

    A model that scales its embeddings outside of the embedding's module, or gives a layer more than the hidden states
    of the preceding one, would compute something else in stages. The base model runs once, on three random tokens and
    with every planned module left out, and has to return what it was given.
    """
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    layers = model.get_submodule(plan.list_name)
    short = plan.list_name.removeprefix(prefix)
    behind = [name for name, child in base.named_children() if _is_held(child) and child is not layers]
    behind = [name for name in behind if name in model.config.get_text_config(decoder=True).base_model_pp_plan]
    kept = {name: getattr(base, name) for name in (short, *behind)}
    parameter = next(model.parameters())
    given = torch.randn((1, 3, plan.hidden_size), device=parameter.device, generator=_generator(parameter.device))
    given = given.to(_dtype_of(model))
    try:
        setattr(base, short, nn.ModuleList([MissingModule(layer, str(place)) for place, layer in enumerate(layers)]))
        for name in behind:
            setattr(base, name, MissingModule(kept[name], name))
        with torch.no_grad():
            positions = torch.arange(3, device=parameter.device)[None]
            found = base(inputs_embeds=given, position_ids=positions, use_cache=False)[0]
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot run in stages: without its layers its base model raises "
            f"{type(error).__name__}: {error}. Use pipeline_parallel_size=1."
        ) from error
    finally:
        for name, module in kept.items():
            setattr(base, name, module)
    if found.shape != given.shape or not torch.equal(found, given):
        raise UnsupportedModel(
            f"{type(model).__name__} changes hidden states outside of the modules that its plan for pipeline "
            "parallelism names, so it cannot run in stages; use pipeline_parallel_size=1."
        )


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of activations, by the first parameter that is not quantised."""
    dtypes = (parameter.dtype for parameter in model.parameters())
    return next((each for each in dtypes if each in (torch.float32, torch.bfloat16, torch.float16)), torch.float32)


def _is_held(module: nn.Module) -> bool:
    return not isinstance(module, MissingModule)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)
