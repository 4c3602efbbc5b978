"""Conversion of conversations to token ids, through a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from piecegraph.errors import ConfigError, RequestError, did_you_mean
from piecegraph.runner.prompts.tokenize import TokenizedPrompt, tokenize_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A mapping `{"role": ..., "content": ...}`; `content` is text, or a list of texts and `{"type": "text", "text": ...}`.
"""

CONTENT_FORMATS = ("auto", "string", "openai")

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")
"""Types of parts that hold text under their own name, or under `text`."""

_RESERVED = ("add_generation_prompt", "continue_final_message", "chat_template", "tools", "tokenize", "return_dict")
"""Keyword arguments of a template's call that are fields of `ChatOptions`, or that would change the kind of result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The options of converting a conversation to a prompt. Raises `RequestError` if they contradict each other."""

    chat_template: str | None = None
    """A Jinja template, or the name of one of the tokenizer's several; None: the tokenizer's own."""
    chat_template_content_format: str = "auto"
    """The form of contents in templates: `"string"` is text, with parts joined by a line break; `"openai"` is lists of
    parts; `"auto"` is the form that the template can render."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """True: the prompt ends within the last message, which the model continues."""
    tools: Sequence[Any] | None = None
    """JSON schemas of functions, for templates that list them."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    tokenization_kwargs: Mapping[str, Any] | None = None
    """Further arguments of the tokenizer's call."""

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message=True goes on with the last message, and add_generation_prompt=True begins "
                "another; give add_generation_prompt=False."
            )
        if self.chat_template_content_format not in CONTENT_FORMATS:
            found = self.chat_template_content_format
            raise RequestError(
                f"chat_template_content_format={found!r} is unknown.{did_you_mean(str(found), CONTENT_FORMATS)}"
            )
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise RequestError(f"chat_template_kwargs={self.chat_template_kwargs!r}; it must be a dictionary.")
        for name in _RESERVED:
            if name in self.chat_template_kwargs:
                raise RequestError(
                    f"chat_template_kwargs has {name!r}; give it as an argument of its own, or not at all."
                )


def conversation_sequence(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """Return the conversations of `messages`, one or several. Raises `RequestError` on any other value."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages={messages!r}; it must be a list of messages, or a list of such lists.")
    if not messages or isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]  # the first item shows which of the two it is
    return messages  # type: ignore[return-value]


def read_chat_template(template: str | Path | None) -> str | None:
    """Return the text of `template`, a Jinja template or the path of a file that holds one. Raises `ConfigError`."""
    if template is None or (isinstance(template, str) and _is_template(template)):
        return template
    if not isinstance(template, str | Path):
        raise ConfigError(f"chat_template={template!r}; it must be a Jinja template or the path of a file with one.")
    path = Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template={str(template)!r} is neither a Jinja template nor a file that can be read ({error})."
        ) from error


def tokenize_chat(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase | None, options: ChatOptions | None = None
) -> TokenizedPrompt:
    """Convert a conversation by the model's chat template, or that of `options`. Raises `RequestError`."""
    options = options if options is not None else ChatOptions()
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer, and there is none (skip_tokenizer_init); use prompt_token_ids.")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(f"a conversation is a list of messages, not {messages!r}.")
    if not messages:
        raise RequestError("the conversation is empty; give at least one message.")
    if options.chat_template is None and not tokenizer.chat_template:
        raise RequestError("the model's tokenizer has no chat template. Use generate, or pass chat_template=...")
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if options.chat_template is not None and not (
        _is_template(options.chat_template) or options.chat_template in named
    ):
        raise RequestError(
            f"chat_template={options.chat_template!r} is not a Jinja template, and the tokenizer has none of that "
            "name; give its text, or a file to LLM(chat_template=...)."
        )
    try:
        template = tokenizer.get_chat_template(
            options.chat_template, tools=None if options.tools is None else [*options.tools]
        )
    except ValueError as error:
        raise RequestError(f"no such chat template: {error}") from error
    forms = _content_forms(tokenizer, template, options.chat_template_content_format)
    rendered = [_rendered_message(message, number, forms) for number, message in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(
            rendered,
            chat_template=template,
            tools=None if options.tools is None else list(options.tools),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=False,
            **options.chat_template_kwargs,
        )
    except Exception as error:  # a template raises what it likes about messages it does not take
        raise RequestError(f"the chat template refused the messages: {error}") from error
    assert isinstance(text, str), type(text)
    return tokenize_text(text, tokenizer, options.tokenization_kwargs, add_special_tokens=False)


def _is_template(text: str) -> bool:
    """Return True if `text` is a template, and not the name of one or of a file."""
    return any(sign in text for sign in "{}\n")


class _ContentForms(NamedTuple):
    """The forms of a message's content that a template can render."""

    text: bool
    parts: bool


def _content_forms(tokenizer: PreTrainedTokenizerBase, template: str, content_format: str) -> _ContentForms:
    if content_format == "auto":
        return _probe_content_forms(tokenizer, template)
    return _ContentForms(text=content_format == "string", parts=content_format == "openai")


@lru_cache(maxsize=2)
def _probe_content_forms(tokenizer: PreTrainedTokenizerBase, template: str) -> _ContentForms:
    """Return the forms that `template` renders, by trying both.

    Parts are rendered if both texts of a message are in the result, and nothing of the parts' syntax. A template that
    renders neither form is given texts.
    """

    def render(content: Any) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], chat_template=template, tokenize=False
                )
            )
        except Exception:  # a template raises what it likes about messages it does not take
            return ""

    first, second = "pgProbeOne", "pgProbeTwo"
    parts = render([{"type": "text", "text": first}, {"type": "text", "text": second}])
    takes_parts = first in parts and second in parts and "'type'" not in parts and '"type"' not in parts
    return _ContentForms(text=first in render(first) or not takes_parts, parts=takes_parts)


def _rendered_message(message: Message, number: int, forms: _ContentForms) -> dict[str, Any]:
    """Return a copy of `message` in a form that the template renders. Raises `RequestError`."""
    if not isinstance(message, Mapping):
        raise RequestError(f"message {number} is {message!r}; a message is a dictionary with 'role' and 'content'.")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"message {number} has role={message.get('role')!r}; it must be a string, e.g. 'user'.")
    content = message.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
        rendered: Any = text if forms.text else [{"type": "text", "text": text}]
    elif isinstance(content, Sequence):
        texts = [_part_text(part, number) for part in content]
        rendered = [{"type": "text", "text": text} for text in texts] if forms.parts else "\n".join(texts)
    else:
        raise RequestError(f"message {number} has content={content!r}; it must be text or a list of parts.")
    made = {**message, "content": rendered}
    if isinstance(message.get("tool_calls"), Sequence):
        made["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return made


def _part_text(part: Any, number: int) -> str:
    """Return the text of a part. Raises `RequestError` on any other kind of part, by its name."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"message {number} has a part {part!r}; a part is text or {{'type': 'text', 'text': ...}}.")
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in _TEXT_TYPES:
        named = repr(kind) if kind is not None else f"with {sorted(map(str, part))}"
        raise RequestError(
            f"message {number} has a part of type {named}; this version takes text alone: "
            "{'type': 'text', 'text': ...}."
        )
    text = part.get("text", part.get(kind))
    if not isinstance(text, str):
        raise RequestError(f"message {number} has a part {dict(part)!r}; its text must be a string.")
    return text


def _tool_call(call: Any) -> Any:
    """Return a call of a tool with its arguments as a dictionary, the form templates read, parsed from JSON text."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a tool call has arguments={arguments!r}, which is not JSON ({error}).") from error
    return {**call, "function": {**call["function"], "arguments": parsed}}
