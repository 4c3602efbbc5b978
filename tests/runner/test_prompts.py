"""A prompt is text or tokens, with what may be said about it; anything else is refused by name."""

from __future__ import annotations

import pytest

from piecegraph.errors import RequestError
from piecegraph.runner.prompts import TokenizedPrompt, tokenize, tokenize_chat
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_text_and_tokens() -> None:
    """The caller's list is copied: changing it later changes nothing."""
    ids = TOKENIZER("the end")["input_ids"]
    assert tokenize("the end", TOKENIZER) == TokenizedPrompt("the end", ids)
    given = [5, 6]
    prompt = tokenize({"prompt_token_ids": given, "prompt": "its text", "cache_salt": "mine"}, None)
    given.append(7)
    assert prompt == TokenizedPrompt("its text", [5, 6], "mine")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": [5], "cache_salts": "x"}, "takes no 'cache_salts'. Did you mean 'cache_salt'"),
        ({"prompt_token_ids": [5], "multi_modal_data": {}}, "takes no 'multi_modal_data'. Known: cache_salt"),
        ({"prompt_token_ids": None}, "prompt_token_ids=None; it must be a list of token ids"),
        ({"prompt_token_ids": "5 6"}, "prompt_token_ids='5 6'; it must be a list of token ids"),
        ({"prompt_token_ids": [5], "prompt": 7}, "prompt=7; beside prompt_token_ids it must be their text"),
        ({"prompt_token_ids": [5], "cache_salt": 7}, "cache_salt=7; it must be a string"),
        ({"prompt": "text"}, "not a mapping with"),
        ([5, 6], r"not \[5, 6\]"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenize(prompt, TOKENIZER)  # type: ignore[arg-type]


def test_a_conversation_adds_no_special_tokens_of_its_own() -> None:
    """The template has written those it wants."""
    prompt = tokenize_chat([{"role": "user", "content": "a"}], TOKENIZER)
    assert prompt == TokenizedPrompt("<user>a<assistant>", TOKENIZER("<user>a<assistant>")["input_ids"])
