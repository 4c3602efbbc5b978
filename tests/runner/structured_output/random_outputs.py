"""Outputs that follow a grammar, drawn token by token from its masks without a model."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from piecegraph.runner.structured_output.grammars import GrammarState


def allowed_tokens(state: GrammarState, vocab_size: int) -> list[int]:
    """Return the tokens that may come next."""
    bitmask = np.full((1, -(-vocab_size // 32)), -1, dtype=np.int32)
    state.matcher.fill_bitmask(bitmask, 0)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:vocab_size]
    return [int(token) for token in np.flatnonzero(bits)]


def random_output(
    state: GrammarState, tokenizer: PreTrainedTokenizerBase, vocab_size: int, seed: int, most: int = 2000
) -> str:
    """Return the text of a complete output; EOS is taken wherever it is allowed after some tokens."""
    random, tokens = np.random.default_rng(seed), [0][:0]
    eos = tokenizer.eos_token_id
    while not state.is_stopped:
        allowed = allowed_tokens(state, vocab_size)
        assert allowed, "the grammar allows no token"
        ends = eos in allowed and (len(tokens) > 40 or len(allowed) == 1)
        token = eos if ends else int(random.choice([one for one in allowed if one != eos]))
        if token == eos:
            break
        tokens.append(token)
        state.advance(tokens)
        assert len(tokens) < most, tokenizer.decode(tokens)
    return str(tokenizer.decode(tokens))
