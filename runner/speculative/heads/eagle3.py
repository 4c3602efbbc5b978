"""`Eagle3Head`, the module of an EAGLE-3 head (Li et al., 2025, https://arxiv.org/abs/2503.01840).

Its layers are transformers' own, over the checkpoint's names in the format of the speculators library. At position p it
reads the token at p + 1 and a hidden state of position p, and predicts the token at p + 2. The hidden states are the
model's, joined by `joined`, or the head's own result of the position before.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from piecegraph.runner.speculative.heads.head_config import Eagle3Config

CLASSES = {"llama": "Llama", "qwen3": "Qwen3"}
"""The prefix of transformers' classes by `model_type`."""


class FirstLayer(nn.Module):
    """The first layer, whose attention reads the token's embedding beside the hidden state."""

    def __init__(self, layer: Any, norm: nn.Module, *, norm_before_residual: bool) -> None:
        """Take the parts of a decoder layer of transformers, with projections that are twice as wide."""
        super().__init__()
        hidden_size = layer.self_attn.q_proj.in_features
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(2 * hidden_size, old.out_features, bias=old.bias is not None))
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = norm
        self.norm_before_residual = norm_before_residual

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Return the hidden states `[1, num_tokens, hidden_size]` behind the layer."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=both, position_embeddings=rotary, attention_mask=None)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """An EAGLE-3 head over the flattened tokens of all requests."""

    def __init__(self, config: Eagle3Config) -> None:
        """Make the modules, with the default initialisation of torch."""
        super().__init__()
        layers = config.layer_config
        kind = CLASSES[layers.model_type]
        module = importlib.import_module(f"transformers.models.{layers.model_type}.modeling_{layers.model_type}")
        norm, layer = getattr(module, f"{kind}RMSNorm"), getattr(module, f"{kind}DecoderLayer")
        size, eps = layers.hidden_size, layers.rms_norm_eps
        num_states = len(config.hidden_states)
        self.config = layers
        self.norm_output = config.norm_output
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.input_norm = norm(num_states * config.target_hidden_size, eps=eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(norm(config.target_hidden_size, eps=eps) for _ in range(num_states))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(num_states * config.target_hidden_size, size, bias=False)
        first = FirstLayer(layer(layers, 0), norm(size, eps=eps), norm_before_residual=config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(layer(layers, place) for place in range(1, layers.num_hidden_layers))])
        self.norm = norm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = getattr(module, f"{kind}RotaryEmbedding")(layers)

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for the model's hidden states, side by side in each row of `states`."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        joined: torch.Tensor = self.fc(states)
        return joined

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64, of the positions after `positions`
        positions: torch.Tensor,  # [num_tokens] int64
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        logits_indices: torch.Tensor,  # [num_logits] int64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[num_logits, draft_vocab_size]` and the hidden states of the same rows."""
        embeds, hidden = self.embed_tokens(input_ids)[None], hidden_states[None]
        rotary = self.rotary_emb(embeds, positions[None])
        hidden = self.layers[0](embeds, hidden, rotary)
        for layer in self.layers[1:]:
            hidden = layer(hidden, position_embeddings=rotary, attention_mask=None)
        chosen = hidden[0, logits_indices]
        normed = self.norm(chosen)
        return self.lm_head(normed), normed if self.norm_output else chosen
