"""The module that is compiled: a transformers causal language model on a flattened batch."""

from __future__ import annotations

import torch
from torch import nn

DYNAMIC_DIMS = {
    "input_ids": {0: "num_tokens"},
    "positions": {0: "num_tokens"},
    "logits_indices": {0: "num_logits"},
}


class CausalLMForward(nn.Module):
    """Tokens of all requests in one row; logits only of rows that sample. Attention finds out which
    request a row belongs to through the forward context."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        logits_indices: torch.Tensor,  # [num_logits] int64
    ) -> torch.Tensor:
        """Logits `[num_logits, vocab_size]`."""
        output = self.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_indices,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def example_inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs to trace with; their sizes are not in the trace."""
    positions = torch.arange(8, device=device)
    return torch.zeros_like(positions), positions, torch.tensor([2, 4, 7], device=device)
