"""From the state of a prompt to the output that its caller gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piecegraph.runner.common.logprobs import PromptLogprobs as CallersPromptLogprobs
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput, RequestStateStats
from piecegraph.runner.output.logprob_rows import flat_positions, one_position
from piecegraph.runner.output.outbox import PendingOutput
from piecegraph.runner.output.prompt_state import NOTHING_DELIVERED, Completion, Delivered, PromptState


def make_output(prompt: PromptState, delivered: Delivered, decode: Callable[[int], str] | None) -> PendingOutput | None:
    """Return a prompt's whole output or, where its caller wants deltas, the news since `delivered`, or None.

    `decode` gives the texts of tokens in log probabilities. Changes nothing but `made_prompt_logprobs`.
    """
    texts = [_text(completion) for completion in prompt.completions]
    ends = delivered.ends or ((0, 0, False),) * len(texts)
    now_delivered = NOTHING_DELIVERED
    has_prompt_logprobs = prompt.prompt_logprobs is not None and not delivered.has_prompt_logprobs
    if prompt.is_delta:
        now_delivered = Delivered(tuple(map(_end, prompt.completions, texts)), True)
        if now_delivered == delivered:
            return None
    first = prompt.completions[0]
    output = RequestOutput(
        request_id=prompt.request_id,
        prompt=prompt.prompt,
        prompt_token_ids=prompt.prompt_token_ids,
        prompt_logprobs=_prompt_logprobs(prompt, decode) if has_prompt_logprobs else None,
        finished=prompt.is_finished,
        outputs=[
            _completion_output(completion, text[num_chars:], num_tokens)
            for completion, text, (num_tokens, num_chars, has_ended) in zip(
                prompt.completions, texts, ends, strict=True
            )
            if not (prompt.is_delta and _end(completion, text) == (num_tokens, num_chars, has_ended))
        ],
        num_cached_tokens=first.request.num_cached_tokens,
        metrics=_metrics(first),
    )
    return PendingOutput(prompt, output, now_delivered)


def _prompt_logprobs(prompt: PromptState, decode: Callable[[int], str] | None) -> CallersPromptLogprobs:
    """Return the prompt's log probabilities so far in the caller's form, made once."""
    if prompt.made_prompt_logprobs is None:
        assert prompt.prompt_logprobs is not None, "the prompt asks for no log probabilities"
        params = prompt.completions[0].request.sampling_params
        decode = decode if params.detokenize else None
        if params.flat_logprobs:
            prompt.made_prompt_logprobs = flat_positions(prompt.prompt_logprobs, decode)
        else:
            rows = prompt.prompt_logprobs
            prompt.made_prompt_logprobs = [None if row is None else one_position(row, decode) for row in rows]
    return prompt.made_prompt_logprobs


def output_of_failed(prompt: PromptState) -> RequestOutput:
    """Return an output with tokens only, for a finished prompt whose processing failed."""
    requests = [completion.request for completion in prompt.completions]
    return RequestOutput(
        request_id=prompt.request_id,
        prompt=prompt.prompt,
        prompt_token_ids=prompt.prompt_token_ids,
        finished=True,
        outputs=[
            CompletionOutput(
                index=index,
                text="",
                token_ids=list(request.output_token_ids),
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                error=request.error,
            )
            for index, request in enumerate(requests)
        ],
    )


def _text(completion: Completion) -> str:
    """Return the part of a completion's text that its caller may see."""
    detokenizer = completion.detokenizer
    if detokenizer is None:
        return ""
    return detokenizer.text if completion.request.finish_reason is not None else detokenizer.settled_text()


def _end(completion: Completion, text: str) -> tuple[int, int, bool]:
    """Return what has been delivered of a completion once its caller has this text."""
    request = completion.request
    return len(request.output_token_ids), len(text), request.finish_reason is not None


def _completion_output(completion: Completion, text: str, num_delivered: int) -> CompletionOutput:
    """Return a completion with its tokens from `num_delivered` on, which are copied when they are read."""
    request, rows = completion.request, completion.logprobs
    tokens = request.output_token_ids
    lazy_fields: dict[str, tuple[Any, int, int]] = {"token_ids": (tokens, num_delivered, len(tokens))}
    if rows is not None:
        lazy_fields["logprobs"] = (rows, num_delivered, len(rows))
    return CompletionOutput.with_lazy_fields(
        lazy_fields=lazy_fields,
        index=completion.index,
        text=text,
        cumulative_logprob=completion.cumulative_logprob,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
    )


def _metrics(completion: Completion) -> RequestStateStats:
    request, prompt = completion.request, completion.prompt
    first = completion.first_token_ts
    return RequestStateStats(
        num_generation_tokens=len(request.output_token_ids),
        arrival_time=prompt.arrival_time,
        queued_ts=prompt.queued_ts,
        scheduled_ts=request.scheduled_ts,
        first_token_ts=first,
        last_token_ts=completion.last_token_ts,
        first_token_latency=first - prompt.queued_ts if first else 0.0,
    )
