"""The margin rule accepts what transformers generates, step by step and from its own cache, and nothing else."""

from __future__ import annotations

import pytest

from tests.runner.margin_rule import assert_same_tokens, generate_alone
from tests.runner.tiny_models import VOCAB_SIZE, WINDOW, make_model

PROMPT = list(range(20, 20 + 2 * WINDOW))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "phi3-longrope-long"])
def test_it_accepts_what_transformers_generates_and_no_other_token(name: str) -> None:
    """Answers outgrow the windows; a token is refused wherever it comes."""
    model = make_model(name)
    tokens = generate_alone(model, PROMPT, 2 * WINDOW)
    assert_same_tokens(model, PROMPT, tokens)
    for step in (0, WINDOW, 2 * WINDOW - 1):
        wrong = [*tokens[:step], (tokens[step] + 1) % VOCAB_SIZE, *tokens[step + 1 :]]
        with pytest.raises(AssertionError, match=f"token {step}: "):
            assert_same_tokens(model, PROMPT, wrong)
