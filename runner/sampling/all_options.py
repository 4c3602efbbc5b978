"""The sampler's options, in the order they are applied."""

from __future__ import annotations

import torch

from piecegraph.runner.sampling.options.allowed_token_ids import AllowedTokenIds
from piecegraph.runner.sampling.options.bad_words import BadWords
from piecegraph.runner.sampling.options.logit_bias import LogitBias
from piecegraph.runner.sampling.options.min_tokens import MinTokens
from piecegraph.runner.sampling.options.penalties import Penalties
from piecegraph.runner.sampling.options.protocol import SamplerOption
from piecegraph.runner.sampling.options.truncation import Truncation

OPTIONS = (
    AllowedTokenIds,
    BadWords,
    MinTokens,
    LogitBias,
    Penalties,
    # From here on logits are divided by the temperature each time they are read: by these options, then by the draw.
    Truncation,
)
"""The options in vLLM's order. A new option is a file and a line here."""


def make_options(*, max_num_reqs: int, vocab_size: int, device: torch.device) -> tuple[SamplerOption, ...]:
    """Return an instance of each option, in order, with tables of `max_num_reqs` rows on `device`."""
    return tuple(option(max_num_reqs=max_num_reqs, vocab_size=vocab_size, device=device) for option in OPTIONS)


def with_processors(
    options: tuple[SamplerOption, ...], before: SamplerOption, after: SamplerOption
) -> tuple[SamplerOption, ...]:
    """Return `options` with logits processors before and after the penalties, where vLLM applies them."""
    at = next(place for place, option in enumerate(options) if isinstance(option, Penalties))
    return (*options[:at], before, options[at], after, *options[at + 1 :])
