"""Log probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piecegraph.runner.common.logprobs import Logprob

    Position = Mapping[int, Logprob]

LEAST = -9999.0
"""What stands for minus infinity, which JSON does not have; vLLM's value."""

TokenText = Callable[[int, "Logprob"], str]
"""A function from a token and its log probability to the token's text in replies."""


def token_text(as_ids: bool) -> TokenText:
    """Return the function for `return_tokens_as_token_ids`: `token_id:7` for the text of token 7."""
    if as_ids:
        return lambda token, one: f"token_id:{token}"
    return lambda token, one: one.decoded_token or ""


def chat_logprobs(
    tokens: Sequence[int], positions: Iterable[Position], num_top: int, text_of: TokenText
) -> dict[str, Any]:
    """Return the form of chat completions: an object for each token."""
    content = []
    for token, position in zip(tokens, positions, strict=True):
        top = [_entry(other, one, text_of) for other, one in _top(position, num_top)]
        content.append({**_entry(token, position[token], text_of), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(token: int, one: Logprob, text_of: TokenText) -> dict[str, Any]:
    text = text_of(token, one)
    return {"token": text, "logprob": _finite(one.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def completion_logprobs(
    tokens: Sequence[int], positions: Iterable[Position | None], num_top: int, text_of: TokenText, offset: int
) -> dict[str, Any]:
    """Return the form of text completions: parallel lists; `offset` is that of the first token's text."""
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, position in zip(tokens, positions, strict=True):
        one = None if not position else position[token]
        text = "" if one is None else text_of(token, one)
        found["text_offset"].append(offset)
        found["tokens"].append(text)
        found["token_logprobs"].append(None if one is None else _finite(one.logprob))
        top = {text_of(other, each): _finite(each.logprob) for other, each in _top(position or {}, num_top)}
        if one is not None:
            top.setdefault(text, _finite(one.logprob))  # as in the API, the token itself is among them
        found["top_logprobs"].append(top if position else None)
        offset += len(text)
    return found


def _top(position: Position, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` likeliest tokens of a position, likeliest first."""
    return sorted(position.items(), key=lambda item: -item[1].logprob)[:count]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
