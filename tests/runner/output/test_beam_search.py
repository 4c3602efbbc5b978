"""Beam search finds what a search by hand over the model's own log probabilities finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, BeamSearchParams
from piecegraph.errors import RequestError
from piecegraph.runner.common.logprobs import Logprob
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.output.beam_search import BeamSearchSequence, continuations

PROMPTS = [[5, 6, 7], list(range(60, 80))]


@torch.no_grad()
def searched_by_hand(
    model: PreTrainedModel, prompt: list[int], width: int, length: int, ends: set[int], penalty: float = 1.0
) -> list[tuple[list[int], float]]:
    """The best continuations and their log probabilities, each prefix computed whole."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    completed = []
    for _ in range(length):
        found = []
        for tokens, score in beams:
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1]
            values, ids = logits.log_softmax(-1).topk(2 * width)
            found += [
                ([*tokens, token], score + value) for token, value in zip(ids.tolist(), values.tolist(), strict=True)
            ]
        completed += [beam for beam in found if beam[0][-1] in ends]
        going_on = [beam for beam in found if beam[0][-1] not in ends]
        beams = sorted(going_on, key=lambda beam: -beam[1])[:width]
    best = sorted([*completed, *beams], key=lambda beam: -beam[1] / len(beam[0]) ** penalty)
    return best[:width]


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.0), (2, 2.0)])
def test_beams_equal_a_search_by_hand(llm: LLM, llama: PreTrainedModel, width: int, penalty: float) -> None:
    """Several prompts at once, whose likeliest tokens end the text as soon as any of a few comes."""
    (first,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=width, max_tokens=2, ignore_eos=True))
    eos = first.sequences[0].tokens[-1]
    ends = {*llm.engine.eos_token_ids, eos}
    engine: Any = llm.engine
    kept, engine._checks = engine._checks, replace(engine._checks, eos_token_ids=frozenset(ends))
    try:
        params = BeamSearchParams(beam_width=width, max_tokens=5, length_penalty=penalty)
        outputs = llm.beam_search(PROMPTS, params, concurrency_limit=1 if width == 3 else None)
    finally:
        engine._checks = kept
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = searched_by_hand(llama, prompt, width, 5, ends, penalty)
        assert [sequence.tokens for sequence in output.sequences] == [[*prompt, *tokens] for tokens, _ in wanted]
        for sequence, (tokens, score) in zip(output.sequences, wanted, strict=True):
            assert sequence.cum_logprob == pytest.approx(score, abs=1e-4)
            assert len(sequence.logprobs) == len(tokens)
            assert sequence.finish_reason == ("stop" if tokens[-1] in ends else "length")
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens, skip_special_tokens=True)


def test_beams_equal_those_of_transformers(llm: LLM, llama: PreTrainedModel) -> None:
    """Where no beam ends early the two rules agree."""
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (output,) = llm.beam_search({"prompt_token_ids": PROMPTS[0]}, params)
    made = llama.generate(  # type: ignore[operator]
        torch.tensor([PROMPTS[0]]),
        attention_mask=torch.ones(1, len(PROMPTS[0]), dtype=torch.long),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert [sequence.tokens for sequence in output.sequences] == made.tolist()


def test_only_allowed_tokens_are_continued(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, allowed_token_ids=[7, 9, 11])
    (output,) = llm.beam_search("the", params)
    prompt = llm.get_tokenizer()("the")["input_ids"]
    assert all(set(sequence.tokens[len(prompt) :]) <= {7, 9, 11} for sequence in output.sequences)


def test_an_ended_beam_is_set_aside() -> None:
    beam = BeamSearchSequence({}, [5], [], cum_logprob=-1.0)
    going_on, ended = continuations(beam, {7: Logprob(-0.5), 1: Logprob(-0.25), 9: Logprob(-3.0)}, [7, 1], {1})
    assert [(one.tokens, one.cum_logprob) for one in going_on] == [([5, 7], -1.5)]
    assert [(one.tokens, one.stop_reason) for one in ended] == [([5, 1], 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width=0; it must be a whole number, 1 or more"),
        ({"max_tokens": 2.5}, r"max_tokens=2\.5; it must be a whole"),
        ({"length_penalty": float("nan")}, "length_penalty=nan; it must be a finite number"),
        ({"temperature": float("inf")}, "temperature=inf; it must be a finite number"),
        ({"structured_outputs": {}}, "structured_outputs is not available in a beam search"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ],
)
def test_parameters_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **options})


def test_logprobs_other_than_the_models_own_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "_logprobs_mode", LogprobsMode.RAW_LOGITS)
    with pytest.raises(RequestError, match="adds up the model's own log probabilities, and logprobs_mode='raw_logits'"):
        llm.beam_search("the", BeamSearchParams(beam_width=2, max_tokens=7))


def test_a_prompt_that_leaves_no_room_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="90 tokens and max_tokens=7; together they must be at most max_mod"):
        llm.beam_search([[5] * 90], BeamSearchParams(beam_width=2, max_tokens=7))
