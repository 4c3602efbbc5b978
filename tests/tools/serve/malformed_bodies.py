"""A hundred bodies that no request may have, each with its path, as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


def malformed_bodies() -> list[tuple[str, bytes]]:
    """Return (path, body)."""
    return [*_no_json(), *_bad_values(), *_bad_chats(), *_bad_prompts()]


def _no_json() -> Iterator[tuple[str, bytes]]:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        for body in (b"", b"{", b"[]", b"null", b"7", b'"text"', b"\xff\xfe", b"[" * 5000, b'{"a":' * 5000):
            yield path, body


def _bad_values() -> Iterator[tuple[str, bytes]]:
    values: list[tuple[str, Any]] = [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", 10**30),
        ("n", 17),  # of more places than there are
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 2**70),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", [1]),
        ("stop", [""]),
        ("stop", 7),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "</s>"),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [100000]),
        ("min_tokens", 99),
        ("stream", "perhaps"),
        ("stream_options", {"include_use": True}),
        ("priority", "high"),
        ("cache_salt", 7),
        ("temprature", 1),
        ("best_of", 3),
        ("use_beam_search", True),
        ("prompt_logprobs", -3),
        ("truncate_prompt_tokens", 0),
    ]
    for name, value in values:
        yield TEXT, json.dumps({"prompt": "Hi", "max_tokens": 4, name: value}).encode()
    yield TEXT, b'{"prompt": "Hi", "temperature": NaN}'
    yield TEXT, b'{"prompt": "Hi", "temperature": Infinity}'


def _bad_chats() -> Iterator[tuple[str, bytes]]:
    bodies: list[dict[str, Any]] = [
        {},
        {"messages": []},
        {"messages": "Hi"},
        {"messages": [7]},
        {"messages": [{"content": "Hi"}]},
        {"messages": [{"role": 7, "content": "Hi"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": USER, "top_logprobs": 3},
        {"messages": USER, "logprobs": True, "top_logprobs": -1},
        {"messages": USER, "logprobs": True, "top_logprobs": 10**9},
        {"messages": USER, "chat_template": "{{ messages }}"},
        {"messages": USER, "chat_template_kwargs": {"tools": []}},
        {"messages": USER, "continue_final_message": True},
        {"messages": USER, "modalities": ["audio"]},
        {"messages": USER, "functions": [{"name": "f"}]},
        {"messages": USER, "max_completion_tokens": 0},
        {"messages": USER, "response_format": {"type": "yaml"}},
        {"messages": USER, "response_format": {"type": "json_schema"}},
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        {"messages": USER, "structured_outputs": {}},
        {"messages": USER, "structured_outputs": {"regex": "(a"}},
        {"messages": USER, "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"messages": USER, "tool_choice": "required"},
        {"messages": USER, "tools": [{"type": "search"}]},
        {"messages": USER, "tools": [{"type": "function", "function": {}}]},
        {
            "messages": USER,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ]
    for body in bodies:
        yield CHAT, json.dumps(body).encode()


def _bad_prompts() -> Iterator[tuple[str, bytes]]:
    prompts: list[Any] = [None, 7, [], [[]], "", ["a", 7], [-1], [10**6], [1.5], {"a": 1}, [[1], "a"], [True, None]]
    for prompt in prompts:
        yield TEXT, json.dumps({"prompt": prompt}).encode()
    yield TEXT, json.dumps({"prompt": "Hi", "echo": True, "stream": True, "logprobs": 1}).encode()
    yield TEXT, json.dumps({"prompt": ["Hi"] * 40}).encode()
    yield "/tokenize", json.dumps({"prompt": "a", "messages": USER}).encode()
    yield "/detokenize", json.dumps({"tokens": [10**6]}).encode()
    yield "/detokenize", json.dumps({"tokens": "abc"}).encode()
    yield "/v1/embeddings", json.dumps({"input": "Hi"}).encode()
