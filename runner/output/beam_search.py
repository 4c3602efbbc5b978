"""Beam search: the likeliest continuations of a prompt, several at a time.

Every step runs each beam for one token, as a request of its own whose prefix is in the cache, and keeps the likeliest
of all their continuations. As in vLLM's offline beam search, `2 * beam_width` continuations of a beam are considered,
and one that ends with an EOS token is set aside; after `max_tokens` steps the best of all ended and unended
continuations are returned, by their log probability divided by `length ** length_penalty`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecegraph.errors import RequestError
from piecegraph.runner.common.logprobs import Logprob
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.common.token_ids import plain_number
from piecegraph.runner.prompts.tokenize import TokenizedPrompt

_MAX_FLOAT = sys.float_info.max


@dataclass(slots=True)
class BeamSearchParams:
    """The parameters of a beam search. Raises `RequestError` on a value out of range."""

    beam_width: int
    """The number of continuations that are followed and returned."""
    max_tokens: int
    """The most tokens of a continuation."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """Without effect on the result: log probabilities are the model's own, before the temperature."""
    length_penalty: float = 1.0
    """A value above 0 favours longer continuations, one below 0 shorter ones."""
    include_stop_str_in_output: bool = False
    """Without effect: an EOS token is in `tokens`, and in `text` unless `skip_special_tokens`."""
    structured_outputs: None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens of continuations; None: all tokens."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = plain_number(getattr(self, name))
            setattr(self, name, value)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name}={value!r}; it must be a whole number, 1 or more.")
        for name in ("temperature", "length_penalty"):
            value = plain_number(getattr(self, name))
            setattr(self, name, value)
            if isinstance(value, bool) or not isinstance(value, int | float) or not -_MAX_FLOAT <= value <= _MAX_FLOAT:
                raise RequestError(f"{name}={value!r}; it must be a finite number.")
        if self.structured_outputs is not None:
            raise RequestError("structured_outputs is not available in a beam search; leave it out.")
        if self.watermarking:
            raise RequestError("watermarking=True is not available: tokens are not watermarked.")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; it must hold a token id or more, or be None (all tokens).")


@dataclass(slots=True)
class BeamSearchSequence:
    """A continuation, the prompt included."""

    orig_prompt: Mapping[str, Any]  # prompt_token_ids, and prompt, its text or None
    tokens: list[int]  # prompt and continuation
    logprobs: list[Any]  # for each token of the continuation, those of the tokens that were considered
    lora_request: None = None
    cum_logprob: float = 0.0  # of the continuation
    text: str | None = None  # of `tokens`; None: there is no tokenizer
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best continuations of a prompt, `beam_width` of them or fewer, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True, kw_only=True)
class _Search:
    """The state of one prompt's search."""

    prompt: TokenizedPrompt
    priority: int
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


RunOneToken = Callable[[Sequence[TokenizedPrompt], SamplingParams, Sequence[int]], Sequence[RequestOutput]]
"""A function `(prompts, sampling_params, priorities) -> outputs`, in the order of the prompts."""


def beam_search(
    prompts: Sequence[TokenizedPrompt],
    params: BeamSearchParams,
    run: RunOneToken,
    *,
    priorities: Sequence[int],
    eos_token_ids: Collection[int],
    max_model_len: int,
    decode: Callable[[Sequence[int]], str] | None,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """Return the best continuations of each prompt, searching `concurrency_limit` prompts at a time (None: all).

    Raises `RequestError` before anything runs if a prompt cannot be continued by `max_tokens`.
    """
    if concurrency_limit is not None and concurrency_limit < 1:
        raise RequestError(f"concurrency_limit={concurrency_limit!r}; it must be 1 or more, or None (all prompts).")
    searches = []
    for prompt, priority in zip(prompts, priorities, strict=True):
        if prompt.embeds is not None:
            raise RequestError("beam search continues tokens, and prompt_embeds has none; give token ids.")
        if len(prompt.token_ids) + params.max_tokens > max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt.token_ids)} tokens and max_tokens={params.max_tokens}; together they must "
                f"be at most max_model_len={max_model_len}."
            )
        original = {"prompt_token_ids": prompt.token_ids, "prompt": prompt.text}
        beams = [BeamSearchSequence(original, list(prompt.token_ids), [])]
        searches.append(_Search(prompt=prompt, priority=priority, beams=beams))
    ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    one_token = SamplingParams(
        logprobs=2 * params.beam_width if params.allowed_token_ids is None else -1,
        max_tokens=1,
        temperature=params.temperature,
        detokenize=False,
    )
    at_once = concurrency_limit if concurrency_limit is not None else max(1, len(searches))
    for first in range(0, len(searches), at_once):
        batch = searches[first : first + at_once]
        for _ in range(params.max_tokens):
            if not _step(batch, params, one_token, run, ends):
                break
    return [_best(search, params, decode) for search in searches]


def _step(
    searches: Sequence[_Search],
    params: BeamSearchParams,
    one_token: SamplingParams,
    run: RunOneToken,
    ends: Collection[int],
) -> bool:
    """Continue all beams by a token; return False if no beam is left."""
    beams = [(search, beam) for search in searches for beam in search.beams]
    if not beams:
        return False
    prompts = [TokenizedPrompt(None, list(beam.tokens), search.prompt.cache_salt) for search, beam in beams]
    outputs = run(prompts, one_token, [search.priority for search, _ in beams])
    for search in searches:
        search.beams = []
    for (search, beam), output in zip(beams, outputs, strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None, "the request asked for log probabilities"
        going_on, ended = continuations(beam, logprobs[0], params.allowed_token_ids, ends)
        search.beams += going_on
        search.completed += ended
    for search in searches:
        search.beams = _sorted(search.beams, params.length_penalty)[: params.beam_width]
    return True


def continuations(
    beam: BeamSearchSequence,
    logprobs: Mapping[int, Logprob],
    allowed: Sequence[int] | None,
    ends: Collection[int],
) -> tuple[list[BeamSearchSequence], list[BeamSearchSequence]]:
    """Return `beam` continued by each allowed token of `logprobs`: the continuations that go on, and those that end."""
    found: tuple[list[BeamSearchSequence], list[BeamSearchSequence]] = ([], [])
    for token, logprob in logprobs.items():
        if allowed is not None and token not in allowed:
            continue
        continued = BeamSearchSequence(
            beam.orig_prompt,
            [*beam.tokens, token],
            [*beam.logprobs, logprobs],
            cum_logprob=beam.cum_logprob + logprob.logprob,
        )
        if token in ends:
            continued.finish_reason, continued.stop_reason = "stop", token
        found[token in ends].append(continued)
    return found


def _sorted(beams: Sequence[BeamSearchSequence], length_penalty: float) -> list[BeamSearchSequence]:
    """Sort beams, the best first, in a stable order. The length is that of the continuation, EOS included."""
    return sorted(beams, key=lambda beam: beam.cum_logprob / max(len(beam.logprobs), 1) ** length_penalty, reverse=True)


def _best(search: _Search, params: BeamSearchParams, decode: Callable[[Sequence[int]], str] | None) -> BeamSearchOutput:
    for beam in search.beams:
        beam.finish_reason = "length"
    best = _sorted([*search.completed, *search.beams], params.length_penalty)[: params.beam_width]
    if decode is not None:
        for beam in best:
            beam.text = decode(beam.tokens)
    return BeamSearchOutput(best)
