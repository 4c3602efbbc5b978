"""The tools of a chat request: what the template is told of them, and what the answer's grammar is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piecegraph.tools.serve.endpoints.generation_service import GenerationService
from piecegraph.tools.serve.message_parsers.choose import message_parser, tool_format
from piecegraph.tools.serve.message_parsers.protocol import MessageDelta, MessageParser, ToolFormat
from piecegraph.tools.serve.protocol.error_replies import bad_request
from piecegraph.tools.serve.protocol.request_models import ChatBody
from piecegraph.tools.serve.protocol.tool_fields import functions


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form of a chat request's answer."""

    template: str  # the chat template
    tools: list[dict[str, Any]] | None  # as the template takes them; None: it is told of none
    format: ToolFormat | None  # of calls; None: none may be made
    sampling: Mapping[str, Any]  # options of `SamplingParams`
    has_grammar: bool

    def parser(self, prompt: str) -> MessageParser:
        """Return a parser of an answer to `prompt`.

        An output with a grammar begins with the answer itself, and has no reasoning.
        """
        return message_parser("" if self.has_grammar else self.template, prompt, self.format)


def answer_form(service: GenerationService, body: ChatBody) -> AnswerForm:
    """Return the form of the answer that `body` asks for. Raises `ApiError` if the model cannot have it."""
    template = service.check_template(body.chat_template) or service.template
    options = body.sampling_options()
    if not body.may_call:
        has_grammar = options.get("structured_outputs") is not None
        return AnswerForm(template=template, tools=None, format=None, sampling=options, has_grammar=has_grammar)
    assert body.tools is not None, "checked by may_call"
    try:
        allowed = functions(body.tools, body.tool_choice or "auto")
    except ValueError as error:
        raise bad_request(str(error)) from error
    if "tools" not in template and not body.forces_call:
        raise bad_request(
            'tools are not available: the model\'s chat template does not list them. tool_choice="required" forces a '
            "call nevertheless."
        )
    form = tool_format(template)
    special = _special_tokens(service, form)
    if special:
        options["skip_special_tokens"] = False  # a call's markers have to be in the text
    if body.forces_call:
        many = body.parallel_tool_calls and body.tool_choice == "required"  # a named function is called once
        grammar = form.grammar(allowed, special=special, many=many)
        options["structured_outputs"] = {"grammar": grammar}
    return AnswerForm(
        template=template,
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools],
        format=form,
        sampling=options,
        has_grammar=options.get("structured_outputs") is not None,
    )


def _special_tokens(service: GenerationService, form: ToolFormat) -> dict[str, int]:
    """Return the token ids of the markers that are special tokens, which are left out of texts otherwise."""
    tokenizer = service.tokenizer
    special = set(tokenizer.all_special_tokens)
    vocabulary = tokenizer.get_vocab()
    return {marker: vocabulary[marker] for marker in form.markers if marker in special}


def message_reply(delta: MessageDelta, *, with_reasoning: bool) -> dict[str, Any]:
    """Return a whole answer as the API's message."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
    if delta.tool_calls:
        message |= {"content": delta.content or None, "tool_calls": [call.reply() for call in delta.tool_calls]}
    if delta.reasoning and with_reasoning:
        message |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    return message


def delta_reply(delta: MessageDelta, num_calls: int, *, with_reasoning: bool) -> dict[str, Any]:
    """Return a part of an answer as the API's delta; `num_calls` came in parts before."""
    made: dict[str, Any] = {"content": delta.content} if delta.content else {}
    if delta.tool_calls:
        calls = enumerate(delta.tool_calls, num_calls)
        made["tool_calls"] = [{"index": index, **call.reply()} for index, call in calls]
    if delta.reasoning and with_reasoning:
        made |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    return made
