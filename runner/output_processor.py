"""From sampled tokens to what callers get: text, log probabilities, and when a completion ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from piecegraph.runner.async_output import PromptLogprobs, TokenLogprobs
from piecegraph.runner.detokenizer import Detokenizer
from piecegraph.runner.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.sampling_params import SamplingParams
from piecegraph.runner.scheduling.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Finish(NamedTuple):
    """Why a completion ends with its last token."""

    reason: str  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop token or string; None for EOS and length


@dataclass(slots=True, kw_only=True, eq=False)
class _Prompt:
    """A prompt and its completions, as the caller sees them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    is_final_only: bool
    prompt_logprobs: list[dict[int, float] | None] | None
    completions: list[_Completion] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(completion.request.finish_reason is not None for completion in self.completions)


@dataclass(slots=True, kw_only=True, eq=False)
class _Completion:
    """One of a prompt's completions."""

    prompt: _Prompt
    index: int
    request: Request
    detokenizer: Detokenizer | None
    is_text_late: bool  # nobody reads the text before the end, so it is made there
    logprobs: list[dict[int, float]] | None
    cumulative_logprob: float | None
    is_quiet: bool  # nothing is made of a token before the last
    max_output: int  # tokens


@dataclass(slots=True, kw_only=True, eq=False)
class _QuietBatch:
    """Requests of which nobody hears before their ends, token after token of them all."""

    requests: Sequence[Request]
    stop_token_ids: frozenset[int]  # of any of them
    steps_left: int  # until the first is as long as it may be


class OutputProcessor:
    """Owns what callers see of the unfinished requests; the scheduler owns the requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prompts: dict[str, _Prompt] = {}
        self._completions: dict[str, _Completion] = {}  # by the id of the scheduler's request
        self._last_requests: Sequence[Request] = ()
        self._quiet: _QuietBatch | None = None  # of `_last_requests`

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, request_id: str, prompt: str | None, requests: Sequence[Request], *, is_final_only: bool) -> None:
        """Follow a prompt whose completions are `requests`, all with the same prompt tokens."""
        first = requests[0]
        params = first.sampling_params
        made = self._prompts[request_id] = _Prompt(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=first.prompt_token_ids,
            is_final_only=is_final_only,
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * first.num_prompt_tokens,
        )
        for index, request in enumerate(requests):
            completion = _Completion(
                prompt=made,
                index=index,
                request=request,
                detokenizer=self._detokenizer(first.prompt_token_ids, params),
                is_text_late=is_final_only and not params.stop_strings,
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
                is_quiet=is_final_only and params.logprobs is None and not params.stop_strings,
                max_output=request.max_total_tokens - request.num_prompt_tokens,
            )
            made.completions.append(completion)
            self._completions[request.request_id] = completion

    def request_ids(self, request_id: str) -> tuple[str, ...]:
        """The scheduler's ids of a prompt's unfinished completions."""
        prompt = self._prompts[request_id]
        return tuple(c.request.request_id for c in prompt.completions if c.request.finish_reason is None)

    def take_tokens(
        self,
        requests: Sequence[Request],
        logprobs: Mapping[str, TokenLogprobs],
        tokens: Sequence[int] | None = None,
    ) -> tuple[list[tuple[Request, Finish]], list[str]]:
        """`take_token` for every request that a step gave one: those that end, and the prompts there is news of.

        `tokens`: those very tokens, in order, if the caller has them so. Given the same list of requests again,
        which must then hold the same ones, a step that ends none and that nobody reads looks at none of them.
        """
        is_same = requests is self._last_requests
        if is_same and self._is_quiet(tokens):
            return [], []
        ended: list[tuple[Request, Finish]] = []
        news: dict[str, None] = {}
        completions = self._completions
        for request in requests:
            completion = completions[request.request_id]
            output = request.output_token_ids
            if completion.is_quiet and len(output) < completion.max_output and output[-1] not in request.stop_token_ids:
                continue  # most of a large batch, most of the time
            news[completion.prompt.request_id] = None
            finish = self.take_token(request, logprobs.get(request.request_id))
            if finish is not None:
                ended.append((request, finish))
        if not is_same:
            self._last_requests, self._quiet = requests, None
        elif self._quiet is None:
            self._quiet = self._quiet_batch(requests)
        return ended, list(news)

    def _is_quiet(self, tokens: Sequence[int] | None) -> bool:
        """Whether `tokens`, one more of each of the last requests, end none and nobody reads them."""
        quiet = self._quiet
        if quiet is None:
            return False
        quiet.steps_left -= 1
        return quiet.steps_left > 0 and tokens is not None and quiet.stop_token_ids.isdisjoint(tokens)

    def _quiet_batch(self, requests: Sequence[Request]) -> _QuietBatch | None:
        """None if somebody reads a token of one of them."""
        completions = [self._completions[request.request_id] for request in requests]
        if not completions or not all(completion.is_quiet for completion in completions):
            return None
        return _QuietBatch(
            requests=requests,
            stop_token_ids=frozenset().union(*[request.stop_token_ids for request in requests]),
            steps_left=min([one.max_output - len(one.request.output_token_ids) for one in completions]),
        )

    def take_token(self, request: Request, logprobs: TokenLogprobs | None) -> Finish | None:
        """Take in the last of a request's `output_token_ids`; tells if the completion ends with it.

        `min_tokens` needs no check here: the sampler does not draw what would end it too early.
        """
        completion = self._completions[request.request_id]
        params = request.sampling_params
        token = request.output_token_ids[-1]
        if completion.logprobs is not None:
            assert logprobs is not None and completion.cumulative_logprob is not None
            completion.logprobs.append(_as_dict(logprobs, params.logprobs))
            completion.cumulative_logprob += logprobs.logprobs[0]
        is_eos = token in self._eos_token_ids and not params.ignore_eos
        is_stop = token in (params.stop_token_ids or ())
        is_text = not (is_eos or is_stop) or params.include_stop_str_in_output
        if completion.detokenizer is not None and is_text and not completion.is_text_late:
            stop_string = completion.detokenizer.append(token)
            if stop_string is not None:
                return Finish("stop", stop_string)
        if is_eos or is_stop:
            return Finish("stop", None if is_eos else token)
        return Finish("length") if request.num_tokens >= request.max_total_tokens else None

    def take_prompt_logprobs(self, request_id: str, found: PromptLogprobs) -> None:
        """Take in log probabilities of some of a request's prompt; those of a repeated chunk replace the first."""
        completion = self._completions.get(request_id)
        if completion is None or completion.prompt.prompt_logprobs is None:
            return  # it ended meanwhile
        wanted = completion.request.sampling_params.prompt_logprobs
        rows = [_as_dict(row, wanted) for row in found.positions]
        completion.prompt.prompt_logprobs[found.start : found.start + len(rows)] = rows

    def finish(self, request: Request) -> None:
        """A request has ended, and its `finish_reason` says why: make the rest of its text."""
        completion = self._completions.pop(request.request_id)
        detokenizer = completion.detokenizer
        if detokenizer is None:
            return
        if completion.is_text_late:
            tokens = request.output_token_ids
            hides_last = request.finish_reason == "stop" and not request.sampling_params.include_stop_str_in_output
            detokenizer.add_unread(tokens[:-1] if hides_last else tokens)
        if not isinstance(request.stop_reason, str):
            detokenizer.finish()

    def output(self, request_id: str) -> RequestOutput | None:
        """A prompt as it stands; forgotten once it is finished. None if its caller wants only that."""
        prompt = self._prompts[request_id]
        is_finished = prompt.is_finished
        if is_finished:
            del self._prompts[request_id]
        elif prompt.is_final_only:
            return None
        return RequestOutput(
            request_id=request_id,
            prompt=prompt.prompt,
            prompt_token_ids=prompt.prompt_token_ids,
            prompt_logprobs=None if prompt.prompt_logprobs is None else list(prompt.prompt_logprobs),
            finished=is_finished,
            outputs=[_completion_output(completion) for completion in prompt.completions],
        )

    def _detokenizer(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop_strings=params.stop_strings,
            include_stop_string=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )


def _as_dict(row: TokenLogprobs, wanted: int | None) -> dict[int, float]:
    """The token's own, and the likeliest `wanted`, of a batch that may have asked for more; -1 is all."""
    end = None if wanted is None or wanted < 0 else wanted + 1
    found = dict(zip(row.token_ids[1:end], row.logprobs[1:end], strict=True))
    return {row.token_ids[0]: row.logprobs[0], **found}


def _completion_output(completion: _Completion) -> CompletionOutput:
    request, detokenizer = completion.request, completion.detokenizer
    text = ""
    if detokenizer is not None:
        text = detokenizer.text if request.finish_reason is not None else detokenizer.settled_text()
    return CompletionOutput(
        index=completion.index,
        text=text,
        token_ids=list(request.output_token_ids),
        logprobs=None if completion.logprobs is None else list(completion.logprobs),
        cumulative_logprob=completion.cumulative_logprob,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )
