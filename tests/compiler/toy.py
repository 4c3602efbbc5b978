"""A toy decoder with split ops of its own: nothing of the runner, nothing of transformers."""

from __future__ import annotations

import torch
from torch import nn

_library = torch.library.Library("pgtoy", "DEF")  # kept alive: ops live as long as it does


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str) -> None:
    out.copy_(torch.softmax(query @ key.T, dim=-1) @ value)


_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, str layer) -> ()")
_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention", lambda *args: None, "Meta")
_library.define("pair(Tensor x) -> (Tensor, Tensor)")
_library.impl("pair", lambda x: (x + 1, x * 2), "CompositeExplicitAutograd")
_library.impl("pair", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
_library.define("triple(Tensor x) -> Tensor")
_library.impl("triple", lambda x: x * 3, "CompositeExplicitAutograd")
_library.impl("triple", lambda x: torch.empty_like(x), "Meta")

SPLIT_OPS = ("pgtoy::attention",)
DIMS = {"input_ids": {0: "num_tokens"}, "logits_indices": {0: "num_logits"}}
HIDDEN = 16
VOCABULARY = 32


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.project = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        out = torch.empty_like(query)
        torch.ops.pgtoy.attention.default(query, key, value, out, self.name)
        result: torch.Tensor = hidden + self.project(torch.relu(out))
        return result


class Decoder(nn.Module):
    """`(input_ids [num_tokens], logits_indices [num_logits]) -> logits [num_logits, VOCABULARY]`."""

    def __init__(self, num_layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(f"layer.{index}") for index in range(num_layers)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden[logits_indices])
        return logits


def batch(num_tokens: int, num_logits: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of a `Decoder`."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    return input_ids, torch.randint(0, num_tokens, (num_logits,), generator=generator)
