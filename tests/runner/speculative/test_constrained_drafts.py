"""Outputs that follow a grammar are, with drafts, token for token those without, by whatever the drafts violate it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piecegraph import LLM, RequestOutput, SamplingParams
from piecegraph.runner.engine.constrained import ConstrainedRequests
from piecegraph.runner.speculative.constrained_drafts import _fill
from piecegraph.runner.structured_output.llguidance_backend import LLGuidanceBackend
from piecegraph.runner.structured_output.params import StructuredOutputsParams
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.speculative.draft_models import drafts_by
from tests.runner.speculative.drafting_llm import NGRAM, SIZES, assert_same_logprobs
from tests.runner.test_graphs import load

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA, "disable_any_whitespace": True}
BOOLEANS = {"type": "array", "items": {"type": "boolean"}, "maxItems": 5}
TINY = {**SIZES, "skip_tokenizer_init": False}


def asked(structured: dict[str, Any] | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "seed": 1, **options, "structured_outputs": structured})


PROMPTS = {
    "json": ('{"a":1,"b":"x"} {"a":1', asked(JSON, temperature=0.0)),
    "sampled": ('{"a":7,"b":"yy"}', asked(JSON, seed=3, n=2, logprobs=2)),
    "repeats": ("abcabcabcabc", asked({"regex": "(abc){2,6}z"}, temperature=0.0)),
    "ends inside a step": ("okokok", asked({"choice": ["okokok", "no"]}, temperature=0.0, logprobs=1)),
    "free": ("abcabcabcabc", asked(None, temperature=0.0, max_tokens=12)),
    "left": ("abab", asked({"regex": "abab"}, allowed_token_ids=[5])),
    "stopped": ("xyxyxy", asked({"regex": "(xy)+"}, stop=["yx"], temperature=0.0)),
    "chunked": (
        "[[true,[true,[true,[true,",
        asked({"json": BOOLEANS}),
    ),
    "few": ("abcabc", asked({"regex": "[abc]{9}"}, extra_args={"num_speculative_tokens": 1})),
    "short": ("aaaaaaa", asked({"regex": "a{30}"}, max_tokens=7, temperature=0.0)),
}


def answers(llm: LLM) -> list[RequestOutput]:
    texts, params = [text for text, _ in PROMPTS.values()], [one for _, one in PROMPTS.values()]
    return llm.generate(texts, params, use_tqdm=False)


def assert_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for name, ours, theirs in zip(PROMPTS, found, expected, strict=True):
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (list(one.token_ids), one.text) == (list(other.token_ids), other.text), name
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason), name
            assert one.error == other.error, name
            assert_same_logprobs(one.logprobs, other.logprobs)


@pytest.fixture(scope="module")
def expected(llama_dir: Path) -> list[RequestOutput]:
    with load(llama_dir, **TINY) as llm:
        found = answers(llm)
    reasons = {name: [one.finish_reason for one in output.outputs] for name, output in zip(PROMPTS, found, strict=True)}
    assert reasons["json"] == ["stop"] and reasons["left"] == ["error"] and reasons["short"] == ["length"], reasons
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["each step awaited", "a step ahead"])
def llm(request: pytest.FixtureRequest, llama_dir: Path) -> Iterator[LLM]:
    with load(llama_dir, **TINY, speculative_config=NGRAM, async_scheduling=request.param) as llm:
        yield llm
        stats = llm.engine.stats
        assert stats.num_free_blocks == stats.num_blocks, "blocks leaked"


def test_outputs_are_those_without_drafts(llm: LLM, expected: list[RequestOutput]) -> None:
    """Greedy and sampled, with log probabilities, stops and ends inside a step; and drafts are accepted."""
    assert_equal(answers(llm), expected)
    stats = llm.engine.stats.speculation
    assert stats is not None and 10 < stats.num_accepted_tokens < stats.num_draft_tokens
    json.loads(expected[0].outputs[0].text)
    assert re.fullmatch("(abc){2,6}z", expected[2].outputs[0].text)


@pytest.mark.slow
def test_requests_that_give_way_keep_to_their_grammars(llama_dir: Path, expected: list[RequestOutput]) -> None:
    with load(llama_dir, **{**TINY, "num_kv_blocks": 14, "max_model_len": 56}, speculative_config=NGRAM) as llm:
        assert_equal(answers(llm), expected)
        assert llm.engine.stats.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("is_ahead", [False, True], ids=["each step awaited", "a step ahead"])
def test_a_model_drafts_for_grammars(llama_dir: Path, expected: list[RequestOutput], is_ahead: bool) -> None:
    """It knows nothing of them, so many of its drafts are not allowed."""
    options = {"speculative_config": drafts_by(llama_dir), "async_scheduling": is_ahead}
    with load(llama_dir, **TINY, **options) as llm:
        assert_equal(answers(llm), expected)


def test_an_interrupted_step_loses_no_progress(
    llm: LLM, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that fail before the draw, while masks are made and while results are taken are computed again."""
    calls = {"sample_tokens": 0, "proposed": 0, "ended": 0}

    def failing(name: str, call: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            calls[name] += 1
            if calls[name] % 5 == 3 and calls[name] < 20:
                raise RuntimeError("now")
            return call(*arguments)

        return wrapped

    monkeypatch.setattr(llm.runner, "sample_tokens", failing("sample_tokens", llm.runner.sample_tokens))
    monkeypatch.setattr(llm.runner, "proposed", failing("proposed", getattr(llm.runner, "proposed")))  # noqa: B009
    monkeypatch.setattr(ConstrainedRequests, "ended", failing("ended", ConstrainedRequests.ended))
    engine, finished = llm.engine, {}
    for name, (text, params) in PROMPTS.items():
        tokens = byte_tokenizer().encode(text)
        engine.add_request(name, tokens, params)
    num_failures = 0
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except RuntimeError:
            num_failures += 1
            continue
        finished.update({output.request_id: output for output in outputs if output.finished})
    assert num_failures > 5 and min(calls.values()) > 2
    assert_equal([finished[name] for name in PROMPTS], expected)


def test_the_mask_of_each_row_follows_from_the_drafts_before_it() -> None:
    """Up to the first that is not allowed, or that ends the output; the matcher is then where it was."""
    tokenizer = byte_tokenizer()
    backend = LLGuidanceBackend(tokenizer, vocab_size=len(tokenizer), eos_token_ids=[1])
    matcher = backend.compile(StructuredOutputsParams(regex="ab[cd]e"))
    a, b, c, d, e = tokenizer.encode("abcde", add_special_tokens=False)
    for drafts, wanted in (
        ([a, b, d], [[a], [b], [c, d], [e]]),
        ([a, c, d], [[a], [b], None, None]),
        ([a], [[a], [b], None, None]),
        ([], [[a], None, None, None]),
    ):
        rows = np.full((4, -(-len(tokenizer) // 32)), -1, dtype=np.int32)
        _fill(rows, matcher, drafts)
        for row, tokens in zip(rows, wanted, strict=True):
            found = [token for token in range(len(tokenizer)) if int(row[token >> 5]) >> (token & 31) & 1]
            assert found == (list(range(len(tokenizer))) if tokens is None else tokens)
    assert matcher.accept([a, b]) is None
    rows = np.full((4, -(-len(tokenizer) // 32)), -1, dtype=np.int32)
    _fill(rows, matcher, [c, e, a])
    assert not matcher.is_stopped() and matcher.accept([d, e]) is None and matcher.is_stopped()


def test_a_mask_that_cannot_be_computed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    backend = LLGuidanceBackend(tokenizer, vocab_size=len(tokenizer), eos_token_ids=[1])
    matcher = backend.compile(StructuredOutputsParams(regex="abcde"))
    fill = type(matcher).fill_bitmask

    def fill_or_fail(self: Any, rows: Any, row: int) -> str | None:
        return fill(self, rows, row) or ("a limit" if row else None)

    monkeypatch.setattr(type(matcher), "fill_bitmask", fill_or_fail)
    rows = np.full((4, -(-len(tokenizer) // 32)), -1, dtype=np.int32)
    assert _fill(rows[:1], matcher, ()) is None
    assert _fill(rows, matcher, tokenizer.encode("abc", add_special_tokens=False)) == "a limit"
