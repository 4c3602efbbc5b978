"""The bodies of requests: the OpenAI API's fields, and vLLM's further ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from piecegraph.errors import did_you_mean, shorten
from piecegraph.tools.serve.protocol.text_or_tokens import text_or_tokens
from piecegraph.tools.serve.protocol.tool_fields import ResponseFormat, Tool, ToolChoice

SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "spaces_between_special_tokens",
    "thinking_token_budget",
    "structured_outputs",
)
"""Fields of a body that are fields of `SamplingParams` under the same name; that class checks their values."""


class Body(BaseModel):
    """A body whose unknown fields are refused with the nearest known one. A field that is null counts as left out.

    Values are read as by vLLM's server, by pydantic's rules: "2" for a number and "yes" for a truth value are taken.

    `ignored`: fields of the OpenAI API that do not change what is generated. `unavailable`: fields that would, each
    with what to do instead; they are accepted if their value is None, False or empty, or one of `without_effect`, which
    ask for what happens anyway.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    ignored: ClassVar[frozenset[str]] = frozenset()
    unavailable: ClassVar[Mapping[str, str]] = {}
    without_effect: ClassVar[Mapping[str, tuple[str | float, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.model_fields:
                if value is not None or cls.model_fields[name].is_required():
                    kept[name] = value
            elif name in cls.unavailable:
                if not (_is_empty(value) or _is_one_of(value, cls.without_effect.get(name, ()))):
                    raise ValueError(f"{name} is not available here: {cls.unavailable[name]}.")
            elif name not in cls.ignored:
                raise ValueError(f"unknown field {shorten(name)!r}.{did_you_mean(name, cls.model_fields)}")
        return kept


def _is_empty(value: Any) -> bool:
    """Return whether a value stands for nothing: None, False, an empty string, list or object."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _is_one_of(value: Any, known: tuple[str | float, ...]) -> bool:
    """Return whether a string or a number, which a truth value is not, is among `known`."""
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value in known


class StreamOptions(Body):
    """What a stream has besides its deltas."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What chat and text completions share."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
            *("prompt_cache_options", "prompt_cache_retention"),
        }
    )
    unavailable: ClassVar[Mapping[str, str]] = {
        "use_beam_search": "LLM.beam_search has it",
        "length_penalty": "LLM.beam_search has it",
        "early_stopping": "LLM.beam_search has it",
        "suffix": "the model continues its prompt",
        "mm_processor_kwargs": "this version takes text alone",
        "media_io_kwargs": "this version takes text alone",
        "moderation": "nothing judges texts here",
        "repetition_detection": "repetition_penalty makes repetitions less likely",
        "max_repetition_pattern_size": "repetition_penalty makes repetitions less likely",
        "min_repetition_pattern_size": "repetition_penalty makes repetitions less likely",
        "repetition_min_count": "repetition_penalty makes repetitions less likely",
        "logits_processors": "classes given to the server's LLM process logits; give their arguments as vllm_xargs",
        "kv_transfer_params": "keys and values stay in this process",
        "lora_request": "an adapter is named by `model`",
        "prompt_embeds": "give token ids",
        "guided_json": "structured_outputs has taken its place",
        "guided_regex": "structured_outputs has taken its place",
        "guided_choice": "structured_outputs has taken its place",
        "guided_grammar": "structured_outputs has taken its place",
        "guided_decoding_backend": "llguidance is the only one",
        "guided_whitespace_pattern": "structured_outputs has taken its place, with a whitespace_pattern",
    }
    without_effect: ClassVar[Mapping[str, tuple[str | float, ...]]] = {
        "length_penalty": (1,),
        "max_repetition_pattern_size": (0,),
        "min_repetition_pattern_size": (0,),
        "repetition_min_count": (0,),
    }

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None

    # vLLM's
    structured_outputs: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    request_id: str | None = Field(default=None, max_length=256)
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    vllm_xargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> GenerationBody:
        if self.best_of not in (None, 1, self.n):
            raise ValueError(
                f"best_of={self.best_of}; it must be 1, or n: as many completions are made as are returned. Ask for n "
                "completions with logprobs, and pick."
            )
        return self

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationBody:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError(
                f"prompt_logprobs={self.prompt_logprobs} has no place in a stream; leave out one of the two."
            )
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options=... is for streams; give stream=true, or leave it out.")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> GenerationBody:
        if self.response_format is None or self.response_format.structured_outputs() is None:
            return self
        if self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs both give the form; leave one out.")
        return self

    def sampling_options(self) -> dict[str, Any]:
        """Return the options of `SamplingParams` that the body sets. A None asks for the default, as in the API."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        if self.response_format is not None and self.response_format.type != "text":
            given["structured_outputs"] = self.response_format.structured_outputs()
        return {name: value for name, value in given.items() if value is not None}


_TEXT = ResponseFormat(type="text")


class ChatMessage(BaseModel):
    """A message; templates may read further fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any] | str] | None = None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    unavailable: ClassVar[Mapping[str, str]] = {
        **GenerationBody.unavailable,
        "audio": "this version writes text alone",
        "web_search_options": "there is no search",
        "prediction": "leave it out, the tokens are the same without it",
        "functions": "tools has taken its place",
        "function_call": "tool_choice has taken its place",
        "verbosity": "say in a message how long the answer should be",
        "echo": "the prompt's text is the caller's messages",
        "documents": "give them to the template as chat_template_kwargs",
    }
    without_effect: ClassVar[Mapping[str, tuple[str | float, ...]]] = {
        **GenerationBody.without_effect,
        "function_call": ("none", "auto"),
        "verbosity": ("medium",),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    # vLLM's
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true.")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatBody:
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice asks for a call, and there are no tools.")
        if self.forces_call and (self.structured_outputs or (self.response_format or _TEXT).type != "text"):
            raise ValueError("tool_choice asks for a call, and the answer has another form; leave one out.")
        return self

    @property
    def forces_call(self) -> bool:
        """Return whether the answer has to be a call of a tool."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def may_call(self) -> bool:
        """Return whether the answer may be a call of a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    def sampling_options(self) -> dict[str, Any]:
        """Return the options of `SamplingParams` that the body sets; without a limit, up to the model's length."""
        given = super().sampling_options()
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return {**given, "max_tokens": most, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool = False

    # vLLM's
    add_special_tokens: bool = True

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _check_prompt(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return text_or_tokens("prompt", value, handler)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one or several; a list of numbers is one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]  # its items are all numbers
        return list(self.prompt)

    def sampling_options(self) -> dict[str, Any]:
        """Return the options of `SamplingParams` that the body sets."""
        given = {**super().sampling_options(), "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs != -1:  # -1: those of all tokens
            given["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return given


class LoadLoraBody(Body):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadLoraBody(Body):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # has no effect: the name says which


class TokenizeBody(Body):
    """The body of POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages.")
        return self


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]
