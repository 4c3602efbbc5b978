"""Linear layers and embeddings whose weights are quantised. A module gets a class of ours in place of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import Block, PackedWeight
from piecegraph.runner.quantization.methods.shard import Shard


class QuantisedLinear(nn.Linear):
    """A linear layer without `weight`: code that reads it must not take integers for weights."""

    scheme: str
    block: Block
    weight_packed: nn.Parameter
    weight_scale: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        return self.product(input, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, largest: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ weight.T + bias`, as `LinearMethod.apply` does."""
        packed = PackedWeight(values=self.weight_packed, scale=self.weight_scale, block=self.block)
        return METHODS[self.scheme].apply(x, packed, bias, largest)


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


class CutWeights:
    """The quantised weights of a model of which modules have got a rank's part, so that shared ones stay shared."""

    def __init__(self) -> None:
        # By the id of whole values: these, which must live to keep it, and the rank's values, scales and block.
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter, nn.Parameter, Block]] = {}

    def cut(self, module: Any, shard: Shard) -> None:
        """Give a module with a quantised weight the rank's part of it, in place; one that has it stays as it is.

        Raises `DoesNotFit`.
        """
        whole = module.weight_packed
        if any(values is whole for _, values, _, _ in self._made.values()):
            return
        if id(whole) not in self._made:
            packed = PackedWeight(values=whole.detach(), scale=module.weight_scale.detach(), block=module.block)
            part = METHODS[module.scheme].cut(packed, shard)
            values, scale = (nn.Parameter(each, requires_grad=False) for each in (part.values, part.scale))
            self._made[id(whole)] = whole, values, scale, part.block
        self.share(module)

    def share(self, module: Any) -> None:
        """Give a module the rank's part of its weight if another module that shares it has that."""
        found = self._made.get(id(module.weight_packed))
        if found is not None:
            _, module.weight_packed, module.weight_scale, module.block = found
