"""The module that is compiled: a transformers causal language model on a flattened batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.overrides import TorchFunctionMode

from piecegraph.runner.attention.interface.transformers_attention import POSITIONS_ARGUMENT, needs_positions
from piecegraph.runner.traceable.hidden_states import LeavingHiddenStates, has_leaving_hidden_states

DYNAMIC_DIMS = {
    "input_ids": {0: "num_tokens"},
    "positions": {0: "num_tokens"},
    "logits_indices": {0: "num_logits"},
}


class CausalLMForward(nn.Module):
    """A causal language model over the flattened tokens of all requests, with logits only for selected rows.

    Attention finds the request of each row through the forward context. The model counts positions from
    `first_position` on. Hidden states that leave the model (`let_hidden_states_leave`) are a second result.
    """

    def __init__(self, model: nn.Module, first_position: int = 0) -> None:
        super().__init__()
        self.model = model
        self.first_position = first_position
        self.hands_on_positions = needs_positions(model)
        self.counts_positions = counts_positions(type(model))
        self.has_hidden_states = has_leaving_hidden_states(model)

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        logits_indices: torch.Tensor,  # [num_logits] int64
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[num_logits, vocab_size]`. `positions` count from 0 in each request.

        If hidden states leave the model, they are returned, too, side by side: `[num_tokens, their sizes' sum]`.
        """
        if not self.has_hidden_states:
            return self._logits(input_ids, positions, logits_indices)
        leaving = LeavingHiddenStates()
        with leaving:
            logits = self._logits(input_ids, positions, logits_indices)
        return logits, torch.cat([states[0] for states in leaving.found], dim=-1)

    def _logits(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        if self.first_position:
            positions = positions + self.first_position
        if self.counts_positions:
            with CountedPositions(positions):
                output = self.model(input_ids=input_ids[None], use_cache=False, logits_to_keep=logits_indices)
        else:
            output = self.model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logits_indices,
                **({POSITIONS_ARGUMENT: positions[None]} if self.hands_on_positions else {}),
            )
        logits: torch.Tensor = output.logits[0]
        return logits


def example_inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs to trace with; the trace does not depend on their sizes."""
    positions = torch.arange(8, device=device)
    return torch.zeros_like(positions), positions, torch.tensor([2, 4, 7], device=device)


def counts_positions(model_class: Any) -> bool:
    """Return whether a model's forward takes no positions; a model of layers with states may need none."""
    is_stateful = getattr(model_class, "_is_stateful", False)
    return not is_stateful and "position_ids" not in inspect.signature(model_class.forward).parameters


class CountedPositions(TorchFunctionMode):
    """A mode in which `torch.arange(num_tokens)` returns the positions of the tokens of a flattened batch."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__()
        self.positions = positions  # [num_tokens] int64

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or return the positions."""
        if func is torch.arange:
            if len(args) == 1 and guard_or_false(args[0] == self.positions.shape[0]):
                return self.positions
            if len(args) == 2 and guard_or_false(args[0] == 0) and guard_or_false(args[1] == self.positions.shape[0]):
                return self.positions
        return func(*args, **(kwargs or {}))
