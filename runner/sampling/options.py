"""The sampler's options, in the order they are applied."""

from __future__ import annotations

import torch

from piecegraph.runner.sampling.allowed_token_ids import AllowedTokenIds
from piecegraph.runner.sampling.bad_words import BadWords
from piecegraph.runner.sampling.logit_bias import LogitBias
from piecegraph.runner.sampling.min_tokens import MinTokens
from piecegraph.runner.sampling.penalties import Penalties
from piecegraph.runner.sampling.sampler_option import SamplerOption
from piecegraph.runner.sampling.truncation import Truncation

OPTIONS = (
    AllowedTokenIds,
    BadWords,
    MinTokens,
    LogitBias,
    Penalties,
    # Here logits are divided by the temperature, each time they are read: by what follows, then by the draw.
    Truncation,
)
"""vLLM's order. To add an option, write its file and a line here."""


def make_options(*, max_num_reqs: int, vocab_size: int, device: torch.device) -> tuple[SamplerOption, ...]:
    return tuple(option(max_num_reqs=max_num_reqs, vocab_size=vocab_size, device=device) for option in OPTIONS)
