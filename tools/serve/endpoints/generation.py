"""What chat and text completions share: parameters, prompts that run together, streams that end with their client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from piecegraph.errors import RequestError, UsageError
from piecegraph.runner.common.sampling_params import FIELDS, RequestOutputKind, SamplingParams
from piecegraph.runner.prompts.tokenize import TokenizedPrompt
from piecegraph.runner.structured_output.grammars import TooManyGrammars
from piecegraph.tools.serve.endpoints.generation_service import GenerationService
from piecegraph.tools.serve.endpoints.service import refused
from piecegraph.tools.serve.engine.engine_thread import EngineStopped, StepsFailed, WaitedTooLong
from piecegraph.tools.serve.protocol.error_replies import ApiError, json_text

if TYPE_CHECKING:
    from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
    from piecegraph.runner.llm import LLM
    from piecegraph.runner.lora.request import LoRARequest

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

EXIT_STACK = "piecegraph.exit_stack"
"""The key of a request's scope under which its `ExitStack` lies, closed when the request has been answered."""

CLIENT_CLOSED_REQUEST = 499
"""The status that is logged for a request whose client has gone; nobody receives it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One prompt of a request, compared by identity."""

    first_index: int  # of its completions among the request's choices
    request_id: str
    prompt: TokenizedPrompt
    lora_request: LoRARequest | None = None  # None: the model itself


def exit_stack(request: Request) -> ExitStack:
    """Return the stack of what is released when the request has been answered."""
    stack = request.scope[EXIT_STACK]
    assert isinstance(stack, ExitStack), stack
    return stack


def sampling_params(
    llm: LLM, given: Mapping[str, Any], *, is_stream: bool, extra_args: Mapping[str, Any] | None
) -> SamplingParams:
    """Return the model's default parameters with `given` ones, as `SamplingParams` that cannot change any more."""
    defaults = llm.get_default_sampling_params()
    options = {name: getattr(defaults, name) for name in FIELDS}
    options |= {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    kind = RequestOutputKind.DELTA if is_stream else RequestOutputKind.CUMULATIVE
    return SamplingParams.from_optional(**{**options, "output_kind": kind, "extra_args": extra_args}).snapshot()


async def outputs_of(
    service: GenerationService, jobs: Sequence[Job], params: SamplingParams, *, priority: int, is_final_only: bool
) -> AsyncIterator[tuple[Job, RequestOutput]]:
    """Yield the outputs of prompts that run together. A reader that stops earlier aborts them."""
    arrived: asyncio.Queue[tuple[Job, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def read(job: Job) -> None:
        outputs = service.outputs(
            job.request_id,
            job.prompt,
            params,
            priority=priority,
            is_final_only=is_final_only,
            lora_request=job.lora_request,
        )
        try:
            async with aclosing(outputs) as closing:  # type: ignore[type-var]  # an async generator
                async for output in closing:
                    arrived.put_nowait((job, output))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    readers = [asyncio.ensure_future(read(job)) for job in jobs]
    try:
        num_running = len(readers)
        while num_running:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def until_disconnected(request: Request, work: Awaitable[_T]) -> _T | None:
    """Return what `work` returns, or None if the client goes away first; `work` is cancelled then."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """A response of server-sent events, whose generator is closed at once when the client goes away."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]  # `event_stream` gives a generator
            await super().stream_response(send)


def event_stream(events: AsyncIterator[Mapping[str, Any]]) -> Response:
    """Return a response that sends `events` as they come, then `[DONE]`. An error becomes the last event."""

    async def lines() -> AsyncIterator[str]:
        try:
            async with aclosing(events):  # type: ignore[type-var]  # a generator
                async for event in events:
                    yield f"data: {json_text(event)}\n\n"
        except Exception as error:
            yield f"data: {json_text(as_api_error(error).body())}\n\n"
        yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventStream(lines(), headers=headers, media_type="text/event-stream")


def check_end(completion: CompletionOutput) -> None:
    """Raise `ApiError` for a completion that has ended with an error of its own."""
    if completion.finish_reason == "error":
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"the completion has failed: {completion.error}")


def as_api_error(error: Exception) -> ApiError:
    """Return any error as one for the client; what went wrong inside of the server is not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return refused(error)
    if isinstance(error, WaitedTooLong):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="waited_too_long")
    if isinstance(error, TooManyGrammars):
        return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(error), code="too_many_grammars")
    if isinstance(error, EngineStopped):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="engine_stopped")
    if isinstance(error, UsageError):  # of the engine's state, such as its sleep, and not of the request
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="engine_unavailable")
    if isinstance(error, StepsFailed):  # the log has what the steps raised
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), code="steps_failed")
    logger.error("a request has failed", exc_info=error)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server has failed on this request; its log has more.")


def usage(num_prompt: int, num_cached: int, num_completion: int) -> dict[str, Any]:
    """Return the counts of tokens of a reply."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def prompt_logprobs_reply(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """Return the log probabilities of a prompt as vLLM has them: for each token, entries by token id."""
    if output.prompt_logprobs is None:
        return None
    return [
        {
            str(token): {
                "logprob": max(one.logprob, -9999.0),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in position.items()
        }
        if position
        else None
        for position in output.prompt_logprobs
    ]
