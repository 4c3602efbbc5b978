"""What an answer must be, by transformers alone and the definitions of the sampling options.

transformers computes a prompt with an answer after it, in one piece and with nothing beside it. Each token must
then be the one its own logits lead to: the margin rule, at every token instead of up to the first near tie. Where
an option draws a line between tokens (top_k, top_p, min_p), those within the noise of it may be on either side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from transformers import PreTrainedModel

from piecegraph.runner.common.logprobs import Logprob
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.gumbel_sample import gumbel_noise
from tests.runner.logprob_values import values_of
from tests.runner.margin_rule import FLOAT32_NOISE

LOG_STEP = 2.0**-22
"""Absolute error of a fast float32 logarithm of a number near one, as GPUs have it."""


class AloneModel:
    """transformers' model in float32 on the CPU, its logits kept for those who ask again."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.logits = lru_cache(maxsize=512)(self._logits)
        """A function from tokens to the logits of the token after each, `[num_tokens, vocab_size]` float64."""

    @torch.no_grad()
    def _logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0].double()
        return logits


def assert_answer(
    model: AloneModel,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    eos_token_id: int,
) -> None:
    """Every token of `output` is what the model, the options and the noise of `seed` make of those before it."""
    logits = model.logits((*prompt, *output))
    for step, token in enumerate(output):
        right = right_tokens(
            logits[len(prompt) + step - 1], prompt, output[:step], params, seed=seed, eos_token_id=eos_token_id
        )
        assert right[token], f"token {step}: {token}, not of {right.nonzero().flatten().tolist()}"


def right_tokens(
    raw: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    eos_token_id: int,
) -> torch.Tensor:
    """`[vocab_size]` bool: tokens that may follow `output`; one, or those that nearly tie. `raw`: logits there."""
    changed = _changed(raw, prompt, output, params, _stops(params, eos_token_id))
    error = FLOAT32_NOISE * max(1.0, float(raw.abs().max()))
    error *= max(params.repetition_penalty, 1 / params.repetition_penalty)
    if params.is_greedy:
        return changed >= changed.max() - error
    scores, error = changed / params.temperature, error / params.temperature
    surely, maybe = _kept(scores, error, params)
    position = torch.tensor([len(prompt) + len(output)])
    noise = gumbel_noise(torch.tensor([seed]), position, len(raw))[0].double()
    errors = error + LOG_STEP * noise.exp()
    to_reach = (scores + noise - errors).masked_fill(~surely, -math.inf).max()
    return maybe & (scores + noise + errors >= to_reach)


def assert_ends_where_it_must(
    output: Sequence[int], params: SamplingParams, reason: str, *, at_most: int, eos_token_id: int
) -> None:
    """At the first token that ends it, or at its length; an aborted one before both. `at_most`: tokens that the
    model's length leaves room for."""
    stops = _stops(params, eos_token_id)
    assert not stops & set(output[:-1]), f"{output} went on after a token that ends it"
    is_stopped = bool(output) and output[-1] in stops
    max_tokens = at_most if params.max_tokens is None else min(at_most, params.max_tokens)
    if reason == "abort":
        assert not is_stopped and len(output) < max_tokens
    else:
        assert reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(output) == max_tokens


def assert_logprobs(raw: torch.Tensor, token: int, found: Mapping[int, Logprob], wanted: int) -> None:
    """`found` is of the token itself and the `wanted` likeliest, -1 all, by logits `[vocab_size]` before options."""
    error = 2 * FLOAT32_NOISE * max(1.0, float(raw.abs().max()))
    expected = raw.log_softmax(-1)
    num_likeliest = len(raw) if wanted == -1 else wanted
    assert next(iter(found)) == token and len(found) in (num_likeliest, num_likeliest + 1)
    values = values_of(found)
    for one, value in values.items():
        assert abs(float(expected[one]) - value) <= error, f"{one}: {value}, not {float(expected[one])}"
    if num_likeliest:
        least = float(expected.topk(num_likeliest).values[-1])
        others = [value for one, value in values.items() if one != token]
        assert min(others, default=least) >= least - error, "others are likelier"


def _stops(params: SamplingParams, eos_token_id: int) -> set[int]:
    """The tokens that end an output."""
    return {*(params.stop_token_ids or ()), *([] if params.ignore_eos else [eos_token_id])}


def _changed(
    raw: torch.Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, stops: set[int]
) -> torch.Tensor:
    """Logits after all options but those that compare tokens with each other."""
    changed = raw.clone()
    for token, bias in (params.logit_bias or {}).items():
        changed[token] += bias
    seen = torch.tensor(sorted({*prompt, *output}))
    factor = params.repetition_penalty
    changed[seen] = torch.where(changed[seen] > 0, changed[seen] / factor, changed[seen] * factor)
    for token, count in Counter(output).items():
        changed[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        changed[list(stops)] = -math.inf
    return changed


def _kept(scores: torch.Tensor, error: float, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that the options surely keep and possibly keep, if `scores` are off by up to `error`."""
    surely = torch.isfinite(scores)
    maybe = surely.clone()
    if params.min_p > 0:
        least = scores.max() + math.log(params.min_p)
        surely &= scores > least + 2 * error
        maybe &= scores >= least - 2 * error
    if 0 < params.top_k < len(scores):
        best = scores.topk(params.top_k + 1).values
        surely &= scores > best[-1] + 2 * error
        maybe &= scores >= best[-2] - 2 * error
    if params.top_p < 1:
        mass = (scores - scores.max()).exp()
        perhaps_before = _total_above(scores, mass * maybe, scores - 2 * error) - mass * maybe
        surely_before = _total_above(scores, mass * surely, scores + 2 * error)
        most = perhaps_before / (mass * surely).sum().clamp(min=1e-30)
        least = surely_before / (mass * maybe).sum()
        slack = 4 * error
        # The likeliest stays, however small top_p is.
        surely &= (most < params.top_p - slack) | (_total_above(scores, torch.ones_like(mass), scores - 2 * error) <= 1)
        maybe &= (least < params.top_p + slack) | (scores >= scores.max() - 2 * error)
    return surely, maybe


def _total_above(scores: torch.Tensor, amounts: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Return for each of `least` the sum of the amounts of all tokens with higher scores; all `[vocab_size]`."""
    ascending, order = scores.sort()
    totals = torch.cat([amounts[order].flip(0).cumsum(0).flip(0), amounts.new_zeros(1)])
    return totals[torch.searchsorted(ascending, least, right=True)]
