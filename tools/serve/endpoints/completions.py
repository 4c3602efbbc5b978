"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from piecegraph.runner.common.token_ids import kept_tokens
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
from piecegraph.tools.serve.protocol.error_replies import bad_request, json_response
from piecegraph.tools.serve.protocol.logprob_replies import completion_logprobs, token_text
from piecegraph.tools.serve.protocol.request_models import CompletionBody

if TYPE_CHECKING:
    from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
    from piecegraph.runner.common.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Echo:
    """A prompt as text, and its first token, which has no log probability."""

    text: str
    first_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Completions:
    """A checked request, ready to run."""

    service: GenerationService
    body: CompletionBody
    params: SamplingParams
    jobs: Sequence[Job]
    echoes: Sequence[_Echo]  # one for each job; empty: the prompts are not repeated
    request_id: str
    model: str
    created: int

    def outputs(self) -> AsyncIterator[tuple[Job, RequestOutput]]:
        """Return the outputs of all prompts as they come."""
        return outputs_of(
            self.service, self.jobs, self.params, priority=self.body.priority, is_final_only=not self.body.stream
        )

    def echo(self, job: Job) -> _Echo | None:
        """Return what is repeated of the job's prompt."""
        return self.echoes[self.jobs.index(job)] if self.echoes else None

    def logprobs(self, completion: CompletionOutput, offset: int) -> dict[str, Any] | None:
        """Return the log probabilities of a completion's tokens, the first of which is at `offset`."""
        if completion.logprobs is None:
            return None
        text_of = token_text(self.body.return_tokens_as_token_ids)
        return completion_logprobs(completion.token_ids, completion.logprobs, self.body.logprobs or 0, text_of, offset)

    def echo_logprobs(self, job: Job, output: RequestOutput) -> dict[str, Any] | None:
        """Return the log probabilities of a repeated prompt."""
        echo = self.echo(job)
        if echo is None or self.body.logprobs is None or output.prompt_logprobs is None:
            return None
        text_of = token_text(self.body.return_tokens_as_token_ids)
        tokens, positions = output.prompt_token_ids, list(output.prompt_logprobs)
        found = completion_logprobs(tokens[1:], positions[1:], self.body.logprobs, text_of, len(echo.first_token))
        first = f"token_id:{tokens[0]}" if self.body.return_tokens_as_token_ids else echo.first_token
        before = {"text_offset": 0, "tokens": first, "token_logprobs": None, "top_logprobs": None}
        return {name: [before[name], *values] for name, values in found.items()}

    def head(self) -> dict[str, Any]:
        """Return the fields that replies begin with."""
        return {"id": self.request_id, "object": "text_completion", "created": self.created, "model": self.model}


async def completions(service: GenerationService, body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several, whole or as a stream."""
    model = service.check_model(body.model)
    params = sampling_params(
        service.llm, {"max_tokens": 16, **body.sampling_options()}, is_stream=body.stream, extra_args=body.vllm_xargs
    )
    prompts = body.prompts()
    if not prompts:
        raise bad_request("prompt=[]; give at least one prompt.")
    if body.echo and body.stream and body.logprobs is not None:
        raise bad_request("echo with logprobs is not available in a stream; leave out one of the three.")
    if body.echo and params.truncate_prompt_tokens is not None:
        raise bad_request("echo with truncate_prompt_tokens is not available; leave out one of the two.")
    holding = exit_stack(request)
    holding.enter_context(service.places(params.n * len(prompts)))
    request_id = f"cmpl-{body.request_id or uuid4().hex}"

    async def prepared() -> list[Job]:
        jobs, adapter = [], await service.adapters.ready(model)
        for number, prompt in enumerate(prompts):
            tokenized = await service.tokenized(
                prompt, add_special_tokens=body.add_special_tokens, cache_salt=body.cache_salt
            )
            await service.check(tokenized, params, holding)
            jobs.append(
                Job(
                    first_index=number * params.n,
                    request_id=f"{request_id}-{number}",
                    prompt=tokenized,
                    lora_request=adapter,
                )
            )
        return jobs

    jobs = await until_disconnected(request, prepared())
    if jobs is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    work = _Completions(
        service=service,
        body=body,
        params=params,
        jobs=jobs,
        echoes=await _echoes(service, jobs) if body.echo else (),
        request_id=request_id,
        model=model,
        created=int(time.time()),
    )
    if body.stream:
        return event_stream(_chunks(work))
    reply = await until_disconnected(request, _reply(work))
    return Response(status_code=CLIENT_CLOSED_REQUEST) if reply is None else json_response(reply)


async def _echoes(service: GenerationService, jobs: Sequence[Job]) -> list[_Echo]:
    tokenizer = service.tokenizer

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens))

    def make(job: Job) -> _Echo:
        tokens, text = job.prompt.token_ids, job.prompt.text
        return _Echo(text=text if text is not None else decode(tokens), first_token=decode(tokens[:1]))

    return [await service.in_tokenizer_thread(lambda job=job: make(job)) for job in jobs]  # type: ignore[misc]


async def _reply(work: _Completions) -> dict[str, Any]:
    """Return the whole reply."""
    finals: dict[Job, RequestOutput] = {}
    async with aclosing(work.outputs()) as outputs:  # type: ignore[type-var]  # a generator
        async for job, output in outputs:
            finals[job] = output
    choices = []
    for job in work.jobs:
        final, echo = finals[job], work.echo(job)
        before = work.echo_logprobs(job, final)
        for completion in final.outputs:
            check_end(completion)
            logprobs = work.logprobs(completion, 0 if echo is None else len(echo.text))
            if before is not None and logprobs is not None:
                logprobs = {name: [*before[name], *logprobs[name]] for name in logprobs}
            choice: dict[str, Any] = {
                "index": job.first_index + completion.index,
                "text": completion.text if echo is None else echo.text + completion.text,
                "logprobs": logprobs,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if final.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs_reply(final)
            if work.body.return_token_ids:
                choice |= {"token_ids": completion.token_ids, "prompt_token_ids": final.prompt_token_ids}
            choices.append(choice)
    count = usage(
        sum(len(final.prompt_token_ids) for final in finals.values()),
        sum(final.num_cached_tokens for final in finals.values()),
        sum(len(completion.token_ids) for final in finals.values() for completion in final.outputs),
    )
    return {**work.head(), "choices": choices, "usage": count}


async def _chunks(work: _Completions) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream, and the usage if asked for."""
    options, head = work.body.stream_options, work.head()
    is_counting = options is not None and options.include_usage and options.continuous_usage_stats
    most, length = work.params.truncate_prompt_tokens, work.service.llm.max_model_len
    num_prompt = sum(len(kept_tokens(list(job.prompt.token_ids), most, length)) for job in work.jobs)
    num_cached: dict[Job, int] = {}
    num_completion = 0
    offsets: dict[int, int] = {}  # of the next token of each choice, by the texts of its tokens, as in a whole reply
    async with aclosing(work.outputs()) as outputs:  # type: ignore[type-var]  # a generator
        async for job, output in outputs:
            num_cached[job], echo = output.num_cached_tokens, work.echo(job)
            for completion in output.outputs:
                num_completion += len(completion.token_ids)
                check_end(completion)
                index = job.first_index + completion.index
                text = completion.text
                is_first = index not in offsets
                if is_first:
                    offsets[index] = 0
                    text = text if echo is None else echo.text + text
                logprobs = work.logprobs(completion, offsets[index])
                if logprobs is not None and logprobs["tokens"]:
                    offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
                has_news = text or logprobs is not None or work.body.return_token_ids
                if not has_news and completion.finish_reason is None:
                    continue
                choice = {
                    "index": index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                }
                if work.body.return_token_ids:
                    choice["token_ids"] = completion.token_ids
                    if is_first:
                        choice["prompt_token_ids"] = output.prompt_token_ids
                made = {**head, "choices": [choice]}
                if is_counting:
                    made["usage"] = usage(num_prompt, sum(num_cached.values()), num_completion)
                yield made
    if options is not None and options.include_usage:
        yield {**head, "choices": [], "usage": usage(num_prompt, sum(num_cached.values()), num_completion)}
