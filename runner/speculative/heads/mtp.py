"""`MtpHead`, a layer for multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2).

The layer is transformers' own `MtpLayer` around a decoder layer of the model's class, with transformers' loading, which
knows how checkpoints name its tensors (`model.layers.N.enorm`, `hnorm`, `eh_proj`, `shared_head.norm`, behind the
model's N layers). At position p it reads the token at p + 1 and the model's last hidden state of p, or the layer's own
result of the position before, and predicts the token at p + 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.compiler.repeated_layers.find import name_layers
from piecegraph.errors import CheckpointError, PiecegraphError, UnsupportedModel
from piecegraph.runner.attention.interface.latent import keep_latents
from piecegraph.runner.traceable.replace import make_traceable


class MtpHead(nn.Module):
    """A layer for multi-token prediction over the flattened tokens of all requests."""

    def __init__(self, mtp: Any) -> None:
        """Keep `mtp`, transformers' model of one such layer."""
        super().__init__()
        self.mtp = mtp
        self.config = mtp.config

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """Return the model's hidden states `[num_tokens, hidden_size]` as they are."""
        return states

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64, of the positions after `positions`
        positions: torch.Tensor,  # [num_tokens] int64
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        logits_indices: torch.Tensor,  # [num_logits] int64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[num_logits, vocab_size]` and the hidden states of the same rows."""
        mtp, embeds, position_ids = self.mtp, self.mtp.embed_tokens(input_ids)[None], positions[None]
        rotary = None if mtp.rotary_emb is None else mtp.rotary_emb(embeds, position_ids=position_ids)
        mask = cache = None  # by position: versions of transformers name the last otherwise
        hidden = mtp.layers[0](embeds, hidden_states[None], rotary, mask, position_ids, cache)
        if mtp.use_shared_post_norm:
            hidden = mtp.shared_post_norm(hidden)
        chosen = hidden[0, logits_indices]
        return mtp._project_to_logits(chosen), chosen


def mtp_head(model: Any, *, is_random: bool) -> Any:
    """Return the layer of `model`, a loaded model of transformers, with its weights or with random ones.

    Raises `UnsupportedModel` if transformers cannot make it, and `CheckpointError` for tensors that are missing.
    """
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise UnsupportedModel(
            "this version of transformers has no layers for multi-token prediction; install a newer one."
        ) from error
    known = model._keys_to_ignore_on_load_unexpected  # names layers by the numbers of the published models
    model._keys_to_ignore_on_load_unexpected = [rf"layers\.{model.config.get_text_config().num_hidden_layers}\."]
    try:
        mtp: Any = MtpModel(model, 1) if is_random else MtpModel.from_pretrained(model)
    except PiecegraphError:
        raise
    except RuntimeError as error:
        raise CheckpointError(f"{next(iter(str(error).splitlines()), '')}") from error
    except (ValueError, AttributeError, StopIteration) as error:
        name = type(model).__name__
        raise UnsupportedModel(
            f"transformers cannot make the layer for multi-token prediction of {name}: {error}"
        ) from error
    finally:
        model._keys_to_ignore_on_load_unexpected = known
    make_traceable(mtp.layers)
    problem, _ = keep_latents(mtp)
    if problem is not None:
        raise UnsupportedModel(f"{type(model).__name__}: {problem}")
    name_layers(mtp.layers)
    return MtpHead(mtp)
