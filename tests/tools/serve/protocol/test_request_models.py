"""Every field of a request of the OpenAI API or of vLLM's is read, accepted without effect, or refused by its name.

Also tests `embedding_body.py`, `text_or_tokens.py` and the parameter that an error names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming as ChatParams,
)
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from pydantic import ValidationError

from piecegraph import SamplingParams
from piecegraph.errors import RequestError
from piecegraph.tools.serve.protocol.embedding_body import EmbeddingBody
from piecegraph.tools.serve.protocol.error_replies import ApiError, bad_request, invalid_body
from piecegraph.tools.serve.protocol.request_models import SAMPLING_FIELDS, Body, ChatBody, CompletionBody
from tests.test_house import ROOT

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: Mapping[type[Body], dict[str, Any]] = {
    ChatBody: CHAT,
    CompletionBody: {"prompt": "Hi"},
    EmbeddingBody: {"input": "Hi"},
}
OPENAI: Mapping[type[Body], Any] = {
    ChatBody: ChatParams,
    CompletionBody: TextParams,
    EmbeddingBody: EmbeddingCreateParams,
}

VLLM_GENERATION: dict[str, Any] = {
    "use_beam_search": False,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "priority": 0,
    "request_id": "a",
    "logits_processors": None,
    "return_tokens_as_token_ids": None,
    "return_token_ids": None,
    "cache_salt": None,
    "kv_transfer_params": None,
    "vllm_xargs": None,
    "max_repetition_pattern_size": 0,
    "min_repetition_pattern_size": 0,
    "repetition_min_count": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "n": 1,
    "best_of": 1,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "user": None,
}
VLLM: Mapping[type[Body], dict[str, Any]] = {
    ChatBody: {
        **VLLM_GENERATION,
        "logprobs": False,
        "top_logprobs": 0,
        "tools": None,
        "tool_choice": "none",
        "reasoning_effort": None,
        "include_reasoning": True,
        "parallel_tool_calls": True,
        "bad_words": [],
        "echo": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "documents": None,
        "chat_template": None,
        "chat_template_kwargs": None,
        "media_io_kwargs": None,
        "mm_processor_kwargs": None,
    },
    CompletionBody: {
        **VLLM_GENERATION,
        "echo": False,
        "logprobs": None,
        "max_tokens": 16,
        "suffix": None,
        "prompt_embeds": None,
        "add_special_tokens": True,
        "response_format": None,
    },
    EmbeddingBody: {
        "encoding_format": "float",
        "dimensions": None,
        "add_special_tokens": True,
        "truncate_prompt_tokens": None,
        "padding": None,
        "truncation_side": None,
        "request_id": "a",
        "priority": 0,
        "mm_processor_kwargs": None,
        "cache_salt": None,
        "embed_dtype": "float32",
        "endianness": "native",
        "use_activation": None,
        "user": None,
    },
}
"""The fields of vLLM's requests with the values that they have when they are left out."""

EACH_BODY = pytest.mark.parametrize("kind", list(BODIES), ids=lambda kind: kind.__name__)


def refused(kind: type[Body], **fields: Any) -> ApiError:
    """Return the error that the server answers such a body with."""
    with pytest.raises(ValidationError) as caught:
        kind(**{**BODIES[kind], **fields})
    return invalid_body(caught.value.errors())


def sampling(body: ChatBody | CompletionBody) -> SamplingParams:
    return SamplingParams.from_optional(**body.sampling_options())


@EACH_BODY
def test_every_field_of_the_openai_api_is_known(kind: type[Body]) -> None:
    names = set(OPENAI[kind].__annotations__)
    assert len(names) > 4
    assert names <= {*kind.model_fields, *kind.ignored, *kind.unavailable}


@EACH_BODY
def test_what_a_body_takes_is_read(kind: type[Body]) -> None:
    """No field is accepted and then forgotten; `modalities` takes nothing but what happens anyway."""
    sources = "\n".join(path.read_text() for path in sorted(Path(ROOT, "tools", "serve").rglob("*.py")))
    for name in kind.model_fields.keys() - {"modalities"}:
        is_option = issubclass(kind, ChatBody | CompletionBody) and name in SAMPLING_FIELDS
        assert is_option or re.search(rf"\b(body|self)\.{name}\b", sources), name


@EACH_BODY
def test_null_counts_as_left_out(kind: type[Body]) -> None:
    plain = kind(**BODIES[kind])
    for name in {*kind.model_fields, *kind.ignored, *kind.unavailable} - BODIES[kind].keys():
        assert kind(**BODIES[kind], **{name: None}) == plain, name


@EACH_BODY
def test_vllms_defaults_change_nothing(kind: type[Body]) -> None:
    plain = kind(**BODIES[kind])
    for name, value in VLLM[kind].items():
        body = kind(**BODIES[kind], **{name: value})
        if isinstance(body, ChatBody | CompletionBody):
            assert isinstance(plain, ChatBody | CompletionBody)
            assert sampling(body) == sampling(plain), name
            assert body.stream is False


@EACH_BODY
def test_what_cannot_be_done_is_refused_by_its_name(kind: type[Body]) -> None:
    for name in kind.unavailable:
        error = refused(kind, **{name: "something"})
        assert error.message.startswith(f"{name} is not available here: ") and error.param == name, error.message
        assert refused(kind, **{name: True}).param == name
    assert refused(kind, no_such_field=1).param == "no_such_field"


@pytest.mark.parametrize(("best_of", "n"), [(1, None), (1, 3), (3, 3), (None, 3)])
def test_best_of_that_is_one_or_n_changes_nothing(best_of: int | None, n: int | None) -> None:
    body = CompletionBody(prompt="Hi", best_of=best_of, n=n)
    assert sampling(body) == sampling(CompletionBody(prompt="Hi", n=n))


@pytest.mark.parametrize(("best_of", "n"), [(3, None), (3, 2), (2, 3), (0, 1)])
def test_another_best_of_is_refused(best_of: int, n: int | None) -> None:
    error = refused(CompletionBody, best_of=best_of, n=n)
    assert error.param == "best_of" and error.message.startswith(f"best_of={best_of}; it must be 1, or n")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatBody, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (CompletionBody, {"stream_options": {"include_usage": True}}, "stream_options"),
        (ChatBody, {"function_call": "f"}, "function_call"),
        (ChatBody, {"verbosity": "low"}, "verbosity"),
        (CompletionBody, {"length_penalty": 0.5}, "length_penalty"),
        (CompletionBody, {"length_penalty": True}, "length_penalty"),
        (ChatBody, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        (ChatBody, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        (ChatBody, {"modalities": ["text", "audio"]}, "modalities"),
        (ChatBody, {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        (ChatBody, {"response_format": {"type": "text", "triggers": ["<"]}}, "response_format"),
        (ChatBody, {"messages": [{"role": "user", "content": 7}]}, "messages"),
        (EmbeddingBody, {"encoding_format": "bytes"}, "encoding_format"),
        (EmbeddingBody, {"embed_dtype": "float16"}, "embed_dtype"),
        (EmbeddingBody, {"normalize": True, "use_activation": False}, "use_activation"),
    ],
)
def test_a_value_that_cannot_be_done_is_refused_by_its_name(
    kind: type[Body], fields: dict[str, Any], param: str
) -> None:
    assert refused(kind, **fields).param == param


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, {"function_call": "none", "functions": [], "verbosity": "medium"}),
        (CompletionBody, {"length_penalty": 1, "echo": True, "suffix": ""}),
        (EmbeddingBody, {"endianness": "little", "padding": "do_not_pad"}),
        (ChatBody, {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": True}}),
    ],
)
def test_values_that_ask_for_what_happens_anyway_are_accepted(kind: type[Body], fields: dict[str, Any]) -> None:
    kind(**BODIES[kind], **fields)


@pytest.mark.parametrize("name", ["thinking_token_budget", "spaces_between_special_tokens"])
def test_an_option_that_sampling_lacks_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        sampling(CompletionBody.model_validate({"prompt": "Hi", name: 0}))
    assert bad_request(str(caught.value)).param == name


def test_the_other_name_of_normalize_is_read() -> None:
    assert EmbeddingBody(input="Hi", use_activation=False).normalize is False


def test_all_log_probabilities_of_a_repeated_prompt() -> None:
    for wanted, expected in ((None, 2), (5, 5), (-1, -1)):
        body = CompletionBody(prompt="Hi", echo=True, logprobs=2, prompt_logprobs=wanted)
        assert body.sampling_options()["prompt_logprobs"] == expected


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("n", "2", 2),
        ("max_tokens", 7.0, 7),
        ("temperature", "0.5", 0.5),
        ("stream", "yes", True),
        ("logprobs", True, 1),
    ],
)
def test_values_are_read_as_by_vllms_server(name: str, value: Any, read: Any) -> None:
    """By pydantic's rules; what no number or truth value can be meant by is refused."""
    found = getattr(CompletionBody.model_validate({"prompt": "Hi", name: value}), name)
    assert (type(found), found) == (type(read), read)
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": "Hi", name: "perhaps"})


@pytest.mark.parametrize(
    ("prompt", "misfit"),
    [
        (None, "it is None"),
        ([[5], "a"], "prompt[1] is 'a', and prompt[0] is [5]"),
        (["a", 7], "prompt[1] is 7, and prompt[0] is 'a'"),
        ([[5, 1.5]], "prompt[0][1] is 1.5"),
        ({"a": 1}, "it is {'a': 1}"),
    ],
)
def test_a_prompt_of_another_form_is_told_what_does_not_fit(prompt: Any, misfit: str) -> None:
    with pytest.raises(ValidationError) as raised:
        CompletionBody.model_validate({"prompt": prompt})
    error = invalid_body(raised.value.errors())
    assert error.param == "prompt" and "must be a string, a list of strings" in error.message
    assert f"; {misfit}." in error.message
