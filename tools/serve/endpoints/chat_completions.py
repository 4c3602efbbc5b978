"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from piecegraph.runner.common.token_ids import kept_tokens
from piecegraph.runner.prompts.chat import ChatOptions
from piecegraph.tools.serve.endpoints.generation import (
    CLIENT_CLOSED_REQUEST,
    Job,
    check_end,
    event_stream,
    exit_stack,
    outputs_of,
    prompt_logprobs_reply,
    sampling_params,
    until_disconnected,
    usage,
)
from piecegraph.tools.serve.endpoints.generation_service import GenerationService
from piecegraph.tools.serve.endpoints.tools import AnswerForm, answer_form, delta_reply, message_reply
from piecegraph.tools.serve.message_parsers.protocol import MessageParser
from piecegraph.tools.serve.protocol.error_replies import json_response
from piecegraph.tools.serve.protocol.logprob_replies import chat_logprobs, token_text
from piecegraph.tools.serve.protocol.request_models import ChatBody

if TYPE_CHECKING:
    from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
    from piecegraph.runner.common.sampling_params import SamplingParams
    from piecegraph.runner.lora.request import LoRARequest
    from piecegraph.runner.prompts.tokenize import TokenizedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    """A checked request, ready to run."""

    service: GenerationService
    body: ChatBody
    form: AnswerForm
    params: SamplingParams
    job: Job
    model: str
    created: int

    def outputs(self) -> AsyncIterator[tuple[Job, RequestOutput]]:
        """Return the outputs of its prompt."""
        return outputs_of(
            self.service, [self.job], self.params, priority=self.body.priority, is_final_only=not self.body.stream
        )

    def logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Return the log probabilities of a completion's tokens; None if the request asks for none."""
        if completion.logprobs is None:
            return None
        text_of = token_text(self.body.return_tokens_as_token_ids)
        return chat_logprobs(completion.token_ids, completion.logprobs, self.body.top_logprobs or 0, text_of)

    def parser(self) -> MessageParser:
        """Return a parser of one of its answers."""
        return self.form.parser(self.job.prompt.text or "")

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that replies of `kind` begin with."""
        return {"id": self.job.request_id, "object": kind, "created": self.created, "model": self.model}


async def chat_completions(service: GenerationService, body: ChatBody, request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    model = service.check_model(body.model)
    form = answer_form(service, body)
    params = sampling_params(service.llm, form.sampling, is_stream=body.stream, extra_args=body.vllm_xargs)
    holding = exit_stack(request)
    holding.enter_context(service.places(params.n))
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    options = ChatOptions(
        chat_template=service.check_template(body.chat_template),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=form.tools,
        chat_template_kwargs=kwargs,
        tokenization_kwargs={"add_special_tokens": True} if body.add_special_tokens else None,
    )

    async def prepared() -> tuple[TokenizedPrompt, LoRARequest | None]:
        prompt = await service.rendered(messages, options, body.cache_salt)
        await service.check(prompt, params, holding)
        return prompt, await service.adapters.ready(model)

    ready = await until_disconnected(request, prepared())
    if ready is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    prompt, adapter = ready
    request_id = f"chatcmpl-{body.request_id or uuid4().hex}"
    job = Job(first_index=0, request_id=request_id, prompt=prompt, lora_request=adapter)
    chat = _Chat(service=service, body=body, form=form, params=params, job=job, model=model, created=int(time.time()))
    if body.stream:
        return event_stream(_chunks(chat))
    reply = await until_disconnected(request, _reply(chat))
    return Response(status_code=CLIENT_CLOSED_REQUEST) if reply is None else json_response(reply)


async def _reply(chat: _Chat) -> dict[str, Any]:
    """Return the whole reply."""
    final: RequestOutput | None = None
    async with aclosing(chat.outputs()) as outputs:  # type: ignore[type-var]  # a generator
        async for _, output in outputs:
            final = output
    assert final is not None, "a stream without outputs"
    choices = []
    for completion in final.outputs:
        check_end(completion)
        parser = chat.parser()
        message = parser.feed(completion.text) + parser.finish()
        choice = {
            "index": completion.index,
            "message": message_reply(message, with_reasoning=chat.body.include_reasoning),
            "logprobs": chat.logprobs(completion),
            "finish_reason": _finish_reason(completion, has_calls=bool(message.tool_calls)),
            "stop_reason": completion.stop_reason,
        }
        if chat.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        choices.append(choice)
    reply = {
        **chat.head("chat.completion"),
        "choices": choices,
        "usage": usage(
            len(final.prompt_token_ids),
            final.num_cached_tokens,
            sum(len(completion.token_ids) for completion in final.outputs),
        ),
    }
    if final.prompt_logprobs is not None:
        reply["prompt_logprobs"] = prompt_logprobs_reply(final)
    if chat.body.return_token_ids:
        reply["prompt_token_ids"] = final.prompt_token_ids
    return reply


async def _chunks(chat: _Chat) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream: the role of each choice, its deltas, its end, and the usage if asked for."""
    options, head = chat.body.stream_options, chat.head("chat.completion.chunk")
    is_counting = options is not None and options.include_usage and options.continuous_usage_stats
    prompt_token_ids = kept_tokens(
        list(chat.job.prompt.token_ids), chat.params.truncate_prompt_tokens, chat.service.llm.max_model_len
    )
    num_prompt, num_cached, num_completion = len(prompt_token_ids), 0, 0
    parsers = [chat.parser() for _ in range(chat.params.n)]
    num_calls = [0] * chat.params.n

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        made = {**head, "choices": [choice]}
        if is_counting:
            made["usage"] = usage(num_prompt, num_cached, num_completion)
        return made

    for index in range(chat.params.n):
        delta = {"role": "assistant", "content": ""}
        first = chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        if index == 0 and chat.body.return_token_ids:
            first["prompt_token_ids"] = prompt_token_ids
        yield first
    async with aclosing(chat.outputs()) as outputs:  # type: ignore[type-var]  # a generator
        async for _, output in outputs:
            num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
            for completion in output.outputs:
                num_completion += len(completion.token_ids)
                check_end(completion)
                index, logprobs = completion.index, chat.logprobs(completion)
                part = parsers[index].feed(completion.text)
                if completion.finish_reason is not None:
                    part += parsers[index].finish()
                has_news = part or logprobs is not None or chat.body.return_token_ids
                if not has_news and completion.finish_reason is None:
                    continue
                delta = delta_reply(part, num_calls[index], with_reasoning=chat.body.include_reasoning)
                num_calls[index] += len(part.tool_calls)
                choice = {
                    "index": index,
                    "delta": delta,
                    "logprobs": logprobs,
                    "finish_reason": _finish_reason(completion, has_calls=num_calls[index] > 0),
                }
                if completion.finish_reason is not None:
                    choice["stop_reason"] = completion.stop_reason
                if chat.body.return_token_ids:
                    choice["token_ids"] = completion.token_ids
                yield chunk(choice)
    if options is not None and options.include_usage:
        yield {**head, "choices": [], "usage": usage(num_prompt, num_cached, num_completion)}


def _finish_reason(completion: CompletionOutput, *, has_calls: bool) -> str | None:
    """Return the API's reason for the end of an answer; None while it goes on."""
    return "tool_calls" if has_calls and completion.finish_reason == "stop" else completion.finish_reason
