"""Linear layers and embeddings whose weights are quantised. A module gets a class of ours in place of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import Block, PackedWeight


class QuantisedLinear(nn.Linear):
    """A linear layer without `weight`: code that reads it must not take integers for weights."""

    scheme: str
    block: Block
    weight_packed: nn.Parameter
    weight_scale: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        packed = PackedWeight(values=self.weight_packed, scale=self.weight_scale, block=self.block)
        return METHODS[self.scheme].apply(input, packed, self.bias)


class QuantisedEmbedding(nn.Embedding):
    """An embedding without `weight`."""

    scheme: str
    block: Block
    weight_packed: nn.Parameter
    weight_scale: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        packed = PackedWeight(values=self.weight_packed, scale=self.weight_scale, block=self.block)
        return METHODS[self.scheme].rows(packed, input)


REPLACED: dict[type[nn.Module], Any] = {nn.Linear: QuantisedLinear, nn.Embedding: QuantisedEmbedding}
"""Our classes by torch's; subclasses may read their weights in ways of their own and stay as they are."""


def replace_weight(module: nn.Module, method: str, values: nn.Parameter, scale: nn.Parameter, block: Block) -> None:
    """Give `module`, whose class is in `REPLACED`, quantised weights in place of `weight`."""
    del module._parameters["weight"]
    module.__class__ = REPLACED[type(module)]
    module.scheme = method  # type: ignore[assignment]  # a plain attribute, which the key of a plan holds
    module.block = block  # type: ignore[assignment]
    module.weight_packed = values
    module.weight_scale = scale
    module._is_hf_initialized = True  # type: ignore[assignment]  # transformers would initialize `weight`
