"""Prompts as callers give them, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from piecegraph.errors import RequestError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Mapping[str, Any]
"""Text, or `{"prompt_token_ids": [...]}`, to which may be added `prompt`, its text, and `cache_salt`: prompts of
unlike salts share no cached prefix."""

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`."""


_KEYS = ("prompt_token_ids", "prompt", "cache_salt")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


def tokenize(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> TokenizedPrompt:
    """`prompt` as token ids, with the special tokens its tokenizer adds. Raises `RequestError`."""
    if isinstance(prompt, str):
        return _tokenize_text(prompt, tokenizer, add_special_tokens=True)
    if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
        found = f"a mapping with {sorted(prompt)}" if isinstance(prompt, Mapping) else f"{prompt!r}"
        raise RequestError(f'a prompt is a string or {{"prompt_token_ids": [...]}}, not {found}.')
    for key in prompt:
        if key not in _KEYS:
            raise RequestError(f"a prompt takes no {key!r}.{did_you_mean(str(key), _KEYS)}")
    salt = prompt.get("cache_salt", "")
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt={salt!r}; it must be a string.")
    token_ids, text = prompt["prompt_token_ids"], prompt.get("prompt")
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise RequestError(f"prompt_token_ids={token_ids!r}; it must be a list of token ids.")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt={text!r}; beside prompt_token_ids it must be their text, or None.")
    return TokenizedPrompt(text=text, token_ids=list(token_ids), cache_salt=salt)


def tokenize_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
) -> TokenizedPrompt:
    """A conversation through the model's chat template, or `chat_template`. Raises `RequestError`."""
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer, and there is none (skip_tokenizer_init); use prompt_token_ids.")
    if not messages:
        raise RequestError("the conversation is empty; give at least one message.")
    if chat_template is None and not tokenizer.chat_template:
        raise RequestError("the model's tokenizer has no chat template. Use generate, or pass chat_template=...")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except Exception as error:  # a template raises what it likes about messages it does not take
        raise RequestError(f"the chat template refused the messages: {error}") from error
    assert isinstance(text, str), type(text)
    return _tokenize_text(text, tokenizer, add_special_tokens=False)


def _tokenize_text(
    text: str, tokenizer: PreTrainedTokenizerBase | None, *, add_special_tokens: bool
) -> TokenizedPrompt:
    if tokenizer is None:
        raise RequestError(
            "a text prompt needs a tokenizer, and there is none (skip_tokenizer_init); "
            'give {"prompt_token_ids": [...]}.'
        )
    if not text:
        raise RequestError("the prompt is empty; give some text.")
    token_ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return TokenizedPrompt(text=text, token_ids=list(token_ids))
