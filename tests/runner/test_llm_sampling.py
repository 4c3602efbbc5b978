"""Every sampling option, through `LLM`, does to the model's choice what its definition says: no more, no less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import RequestError
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.chunking_llm import chunking_llm

TOKENIZER = byte_tokenizer()
EOS = 1
PROMPT = [40, 41, 42, 40, 43, 60, 61, 62, 63, 64, 40]  # more than a step of the fixture holds
A, B, C, D = (TOKENIZER(letter)["input_ids"][0] for letter in "abcd")

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
RANDOM = SamplingParams(temperature=2.0, max_tokens=40, ignore_eos=True, seed=11)
NOISE = 1e-3
"""Two logits nearer than this count as equal: ours and transformers' round differently."""


@pytest.fixture(scope="module", params=[False, True], ids=["in-step", "ahead"])
def llm(llama_dir: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with chunking_llm(llama_dir, is_ahead=request.param) as llm:
        yield llm


def answer(llm: LLM, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The tokens of the one completion."""
    (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params)
    return output.outputs[0].token_ids


@torch.no_grad()
def logits_after(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' logits `[vocab_size]` of the next token, in float32."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, -1]
    return logits.float()


def changed(logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """`logits` under the options of `params`, by their definitions, a token at a time."""
    wanted = logits.clone()
    if params.allowed_token_ids:
        wanted[[i for i in range(len(wanted)) if i not in params.allowed_token_ids]] = float("-inf")
    for token, bias in (params.logit_bias or {}).items():
        wanted[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        wanted[token] = wanted[token] / factor if wanted[token] > 0 else wanted[token] * factor
    for token, count in Counter(output).items():
        wanted[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in ({EOS} if not params.ignore_eos else set()) | set(params.stop_token_ids or ()):
            wanted[token] = float("-inf")
    return wanted


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, repetition_penalty=1.8),
        replace(GREEDY, repetition_penalty=0.5),
        replace(GREEDY, presence_penalty=2.0),
        replace(GREEDY, presence_penalty=-2.0),
        replace(GREEDY, frequency_penalty=1.5),
        replace(GREEDY, frequency_penalty=-1.5),
        replace(GREEDY, logit_bias={A: 3.0, B: 2.5, 200: -100.0}),
        replace(GREEDY, logit_bias={A: 6.0, B: 5.5, C: 5.0}, presence_penalty=1.0, frequency_penalty=0.5),
        replace(GREEDY, allowed_token_ids=[A, B, C, 50, 51, 52]),
        replace(GREEDY, allowed_token_ids=[A, B, EOS], repetition_penalty=1.3, logit_bias={B: 1.0}, ignore_eos=False),
        replace(GREEDY, logit_bias={EOS: 50.0}, ignore_eos=False, min_tokens=5, frequency_penalty=1.0),
    ],
    ids=lambda params: ",".join(
        name
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids")
        if getattr(params, name) not in (None, 0.0, 1.0)
    ),
)
def test_greedy_choice_follows_the_definitions(llm: LLM, llama: PreTrainedModel, params: SamplingParams) -> None:
    """Each token is the likeliest of transformers' logits after the options, and some differ from the plain ones."""
    tokens = answer(llm, params)
    for step, token in enumerate(tokens):
        wanted = changed(logits_after(llama, [*PROMPT, *tokens[:step]]), params, PROMPT, tokens[:step])
        assert float(wanted.max() - wanted[token]) <= NOISE, f"step {step}: {token}, not {int(wanted.argmax())}"
    ended = not params.ignore_eos and tokens[-1] == EOS
    assert ended or len(tokens) == 16
    assert tokens != answer(llm, GREEDY)[: len(tokens)]


def test_all_options_in_one_batch(llm: LLM) -> None:
    """Requests that share steps keep their options to themselves."""
    params = [
        GREEDY,
        replace(GREEDY, logit_bias={A: 50.0}),
        replace(GREEDY, allowed_token_ids=[B, C]),
        replace(GREEDY, repetition_penalty=1.8, presence_penalty=1.0),
        replace(RANDOM, top_k=3, max_tokens=16),
        replace(RANDOM, min_p=0.2, top_p=0.5, max_tokens=16),
        replace(GREEDY, bad_words=["a"], logit_bias={A: 50.0, B: 49.0}),
        replace(GREEDY, min_tokens=4, ignore_eos=False, logit_bias={EOS: 50.0}),
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(params), params)
    assert [output.outputs[0].token_ids for output in outputs] == [answer(llm, one) for one in params]


def test_a_bias_forces_and_forbids_a_token(llm: LLM) -> None:
    """The bias holds at every temperature."""
    assert answer(llm, replace(RANDOM, logit_bias={77: 1e4})) == [77] * 40
    plain = answer(llm, GREEDY)
    assert not {plain[0]} & set(answer(llm, replace(GREEDY, logit_bias={plain[0]: -1e4})))


def test_only_allowed_tokens_are_drawn(llm: LLM) -> None:
    drawn = set(answer(llm, replace(RANDOM, temperature=5.0, allowed_token_ids=[A, B, 100])))
    assert drawn == {A, B, 100}


@pytest.mark.parametrize(
    ("option", "value"), [("top_k", 4), ("top_k", 1), ("top_p", 0.3), ("min_p", 0.3), ("top_p", 1e-6), ("min_p", 1.0)]
)
def test_only_kept_tokens_are_drawn(llm: LLM, llama: PreTrainedModel, option: str, value: float) -> None:
    """Every token drawn is one that the definition keeps; without the option some are not."""

    def num_outside(tokens: Sequence[int]) -> int:
        outside = 0
        for step, token in enumerate(tokens):
            probs = (logits_after(llama, [*PROMPT, *tokens[:step]]) / RANDOM.temperature).softmax(-1)
            likelier = probs[probs > probs[token] * (1 + NOISE)]
            kept = {
                "top_k": len(likelier) < value,
                "top_p": float(likelier.sum()) < value + 1e-6,
                "min_p": float(probs[token]) >= value * float(probs.max()) * (1 - NOISE),
            }[option]
            outside += not kept
        return outside

    options: dict[str, Any] = {option: value}
    assert num_outside(answer(llm, replace(RANDOM, **options))) == 0
    assert num_outside(answer(llm, RANDOM)) > 0


def test_bad_words_are_never_written(llm: LLM) -> None:
    """Bad words of one and of several tokens are not written, at the start or later; without the option they are."""
    params = replace(RANDOM, temperature=5.0, allowed_token_ids=[A, B, C, D], max_tokens=60, seed=1)
    bad = ["c", "ab", "bda"]
    (free,) = llm.generate("x", params)
    assert all(word in free.outputs[0].text for word in bad)
    (output,) = llm.generate("x", replace(params, bad_words=bad))
    text = output.outputs[0].text
    assert len(text) == 60 and set(text) == {"a", "b", "d"}
    assert not [word for word in bad if word in text]


def test_a_bad_word_may_begin_in_no_prompt(llm: LLM) -> None:
    """The end of the prompt does not make the answer's first token part of a bad word, as in vLLM."""
    params = replace(GREEDY, bad_words=["ab"], logit_bias={B: 1e4}, max_tokens=2)
    assert answer(llm, params, [*PROMPT, A]) == [B, B]


def test_no_eos_before_min_tokens(llm: LLM) -> None:
    """EOS and stop tokens both; the first moment they may come, they do."""
    for token, ignore_eos in ((EOS, False), (A, True)):
        params = replace(
            GREEDY, ignore_eos=ignore_eos, stop_token_ids=[A], logit_bias={token: 50.0}, min_tokens=5, max_tokens=12
        )
        tokens = answer(llm, params)
        assert len(tokens) == 6 and tokens.index(token) == 5
        assert answer(llm, replace(params, min_tokens=0)) == [token]
    assert len(answer(llm, replace(params, min_tokens=12))) == 12


def test_seeds_repeat_alone_and_in_company(llm: LLM) -> None:
    """Seeds repeat with `n`, too; completions of one prompt differ, and so do other seeds."""
    params = [replace(RANDOM, n=3, seed=seed) for seed in (1, 50)]
    prompts = [{"prompt_token_ids": PROMPT}] * 2
    together = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]
    alone = [[one.token_ids for one in llm.generate(prompts[:1], one)[0].outputs] for one in reversed(params)][::-1]
    assert together == alone
    assert len({tuple(tokens) for output in together for tokens in output}) == 6


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 3, replace(RANDOM, seed=None))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


def test_the_models_seed_makes_unseeded_requests_repeat(llama_dir: Path) -> None:
    """The same `seed` of `LLM` and the same calls give the same answers; another seed gives others."""

    def tokens(seed: int) -> list[list[int]]:
        with LLM(llama_dir, dtype="float32", compiler="eager", num_kv_blocks=16, max_num_seqs=2, seed=seed) as llm:
            outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, replace(RANDOM, seed=None))
            return [output.outputs[0].token_ids for output in outputs]

    first = tokens(7)
    assert first == tokens(7)
    assert first != tokens(8)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(allowed_token_ids=[261]), "allowed_token_ids=261; it must be token ids below 261"),
        (SamplingParams(logit_bias={300: 1.0}), "logit_bias=300; it must be token ids below 261"),
    ],
)
def test_tokens_the_model_does_not_have_are_refused(llm: LLM, params: SamplingParams, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate("x", params)


def test_a_bad_word_without_tokens_leaves_nothing_queued(llm: LLM) -> None:
    """The error occurs when the request is added, and the requests before it are removed."""
    params = [GREEDY, SamplingParams(bad_words=[" "])]
    with pytest.raises(RequestError, match="bad_words=' '; it must be text that makes a token"):
        llm.generate(["x", "x"], params)
    assert not llm.engine.has_unfinished
