from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.errors import RequestError
from piecegraph.runner.engine.constrained import ConstrainedRequests
from piecegraph.runner.structured_output.llguidance_backend import LLGuidanceMatcher

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA, "disable_any_whitespace": True}


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "a step ahead"])
def llms(llama_dir: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Few blocks, so that requests are preempted; with steps ahead, tokens are known late."""
    options: dict[str, Any] = {"dtype": "float32", "compiler": "eager", "num_kv_blocks": 24, "block_size": 4}
    with LLM(llama_dir, max_num_seqs=6, max_num_batched_tokens=16, async_scheduling=request.param, **options) as llm:
        yield llm


def params(structured: dict[str, Any] | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 1, **options, "structured_outputs": structured})


def text_of(llm: LLM, structured: dict[str, Any], **options: Any) -> str:
    (output,) = llm.generate("hi", params(structured, **options), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop", output
    return output.outputs[0].text


def test_outputs_follow_their_forms(llms: LLM) -> None:
    for seed in range(4):
        jsonschema.validate(json.loads(text_of(llms, JSON, seed=seed)), SCHEMA)
        assert re.fullmatch("[a-c]{2,5}z", text_of(llms, {"regex": "[a-c]{2,5}z"}, seed=seed))
        assert text_of(llms, {"choice": ["yes", "no"]}, temperature=0, seed=seed) in ("yes", "no")


def test_a_mixed_batch_equals_its_requests_alone(llms: LLM) -> None:
    """Constrained or free, chunked or preempted, each output is the one that its request alone gets."""
    prompts = [f"number {number} " * (1 + number % 3) for number in range(12)]
    forms: list[dict[str, Any] | None] = [None, JSON, {"regex": "(ab|c)+z"}]
    requests = [params(forms[number % 3], seed=number, max_tokens=12 + number) for number in range(12)]
    together = llms.generate(prompts, requests, use_tqdm=False)
    alone = [llms.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, requests, strict=True)]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]
    assert [output.outputs[0].text for output in together] == [output.outputs[0].text for output in alone]
    assert not llms.engine.has_unfinished


def test_several_completions_streams_and_log_probabilities(llms: LLM) -> None:
    """Each of `n` follows the form by itself; forbidden tokens have no probability; a stream adds up to the text."""
    several = params(JSON, n=3, logprobs=3)
    (output,) = llms.generate("hi", several, use_tqdm=False)
    for completion in output.outputs:
        jsonschema.validate(json.loads(completion.text), SCHEMA)
        assert completion.logprobs is not None
        first = completion.logprobs[0]
        assert first[completion.token_ids[0]].decoded_token == "{"
        assert first[completion.token_ids[0]].logprob == pytest.approx(0, abs=1e-4)
    *_, last = llms.stream("hi", several)
    assert [completion.text for completion in last.outputs] == [completion.text for completion in output.outputs]


def test_the_form_ends_the_output(llms: LLM) -> None:
    """Whatever `ignore_eos` and `min_tokens` say, nothing follows a complete output; the last token is in the text."""
    assert text_of(llms, {"regex": "abc"}, ignore_eos=True, min_tokens=9) == "abc"
    assert text_of(llms, {"regex": "abc"}, stop=["b"]) == "a"
    (output,) = llms.generate("hi", params({"regex": "a{30}"}, max_tokens=5), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("aaaaa", "length")


def test_options_that_leave_no_token_end_the_request(llms: LLM) -> None:
    """An error of that request alone."""
    bad, good = params({"regex": "abc"}, allowed_token_ids=[5]), params({"regex": "abc"})
    one, other = llms.generate(["hi", "hi"], [bad, good], use_tqdm=False)
    assert one.outputs[0].finish_reason == "error"
    assert one.outputs[0].error is not None
    assert "left its grammar" in one.outputs[0].error
    assert other.outputs[0].text == "abc"


@pytest.mark.parametrize("logprobs", [None, 0], ids=["forced", "drawn"])
def test_a_grammar_that_cannot_be_followed_ends_with_an_error(
    llms: LLM, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """llguidance has a limit that a regex may reach late, and allows EOS alone then, as if the output were complete."""
    fill, last = LLGuidanceMatcher.fill_bitmask, 1 << llms.get_tokenizer().encode("z", add_special_tokens=False)[0] % 32

    def fill_or_fail(self: LLGuidanceMatcher, bitmask: Any, row: int) -> str | None:
        error = fill(self, bitmask, row)
        if [int(word) & 0xFFFFFFFF for word in bitmask[row] if word] != [last]:
            return error
        bitmask[row] = [1 << 1, *[0] * (bitmask.shape[1] - 1)]
        return "a limit"

    monkeypatch.setattr(LLGuidanceMatcher, "fill_bitmask", fill_or_fail)
    bad, good = params({"regex": "[ab]{5}z"}, logprobs=logprobs), params({"regex": "[ab]{5}y"})
    one, other = llms.generate(["hi", "hi"], [bad, good], use_tqdm=False)
    assert (one.outputs[0].finish_reason, len(one.outputs[0].token_ids)) == ("error", 5)
    assert one.outputs[0].error == "RequestError: the grammar cannot be followed any further: a limit"
    assert (other.outputs[0].finish_reason, len(other.outputs[0].token_ids)) == ("stop", 6)


def test_what_cannot_be_compiled_is_refused_before_anything_runs(llms: LLM) -> None:
    with pytest.raises(RequestError, match="unclosed group"):
        llms.generate(["a", "b"], [params(None), params({"regex": "(a"})], use_tqdm=False)
    assert not llms.engine.has_unfinished


def test_an_interrupted_step_loses_no_progress(llms: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that fail before or after the draw are computed again, and the grammars follow."""
    form = {"regex": "[a-c]{12}yyyz"}
    expected = text_of(llms, form, seed=8)
    sample, ended = llms.runner.sample_tokens, ConstrainedRequests.ended
    calls = {"sample": 0, "ended": 0}

    def fail_at(name: str, numbers: tuple[int, ...]) -> None:
        calls[name] += 1
        if calls[name] in numbers:
            raise RuntimeError("now")

    def failing_sample(*arguments: Any) -> Any:
        fail_at("sample", (3, 7))
        return sample(*arguments)

    def failing_ended(self: ConstrainedRequests, *arguments: Any) -> Any:
        fail_at("ended", (4, 10))
        return ended(self, *arguments)

    monkeypatch.setattr(llms.runner, "sample_tokens", failing_sample)
    monkeypatch.setattr(ConstrainedRequests, "ended", failing_ended)
    llms.engine.add_request("x", _tokens(llms, "hi"), params(form, seed=8))
    output, num_failures = None, 0
    while llms.engine.has_unfinished:
        try:
            output = next(iter(llms.engine.step()), output)
        except RuntimeError:
            num_failures += 1
    assert num_failures == 4
    assert output is not None
    assert output.outputs[0].text == expected


def _tokens(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return list(llm.tokenizer(text)["input_ids"])


LONG = {
    "json": {
        "type": "object",
        "properties": {
            "a long name of a field": {"enum": ["yes", "no"]},
            "another of them": {"const": "whatever it is"},
        },
        "required": ["a long name of a field", "another of them"],
        "additionalProperties": False,
    },
    "disable_any_whitespace": True,
}


def test_forced_tokens_are_those_that_would_be_drawn(llms: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked, preempted, a step ahead, `n`, stop strings, a length that ends among them, beside free requests."""
    requests = [
        params(LONG, max_tokens=120),
        params(LONG, max_tokens=120, seed=2, temperature=0.7, presence_penalty=0.5, n=2),
        params(LONG, max_tokens=20),
        params(LONG, max_tokens=120, stop=["name of"]),
        params(None, max_tokens=30),
        params({"regex": "x{20}[ab]y{3}"}, max_tokens=60, repetition_penalty=1.2),
        params({"choice": ["only this"]}, max_tokens=60, temperature=0),
        params(LONG, max_tokens=120, logprobs=1),
    ]
    prompts = [f"number {number} " * (1 + number % 3) for number in range(len(requests))]

    def answers() -> tuple[list[Any], int]:
        before = llms.engine.num_forced_tokens
        outputs = llms.generate(prompts, requests, use_tqdm=False)
        found = [(one.token_ids, one.text, one.finish_reason) for output in outputs for one in output.outputs]
        return found, llms.engine.num_forced_tokens - before

    forced, num_forced = answers()
    monkeypatch.setattr(ConstrainedRequests, "take_forced", lambda *arguments: [])
    drawn, none = answers()
    assert forced == drawn and none == 0
    assert num_forced > 60
    assert [reason for *_, reason in forced] == [
        "stop",
        "stop",
        "stop",
        "length",
        "stop",
        "length",
        "stop",
        "stop",
        "stop",
    ]


def test_forced_tokens_cost_one_step(llms: LLM) -> None:
    """A text without any choice takes two steps, and one more that runs ahead: its first token, then all others."""
    engine = llms.engine
    engine.add_request("a", [5, 6], params({"choice": ["one"]}))
    num_steps, outputs = 0, []
    while engine.has_unfinished:
        outputs += engine.step()
        num_steps += 1
    assert outputs[-1].outputs[0].text == "one" and num_steps <= 3


def test_an_interrupt_among_forced_tokens_loses_none(llms: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, between and after them, wherever an exception comes; the answer is the same."""
    expected = text_of(llms, LONG, seed=8, max_tokens=120)
    for method in ("begin_append", "end_append", "can_append"):
        original = getattr(llms.engine.scheduler, method)
        calls = [0]

        def failing(*arguments: Any, original: Any = original, calls: list[int] = calls) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise RuntimeError("now")
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(llms.engine.scheduler, method, failing)
            assert _survived(llms, seed=8) == (expected, 1)
    take, calls = llms.engine._processor.take_tokens, [0]

    def failing_take(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] in (4, 9):
            raise RuntimeError("now")
        return take(*arguments)

    monkeypatch.setattr(llms.engine._processor, "take_tokens", failing_take)
    assert _survived(llms, seed=8) == (expected, 2)


def _survived(llm: LLM, *, seed: int) -> tuple[str, int]:
    """Return the text of an answer whose steps may fail, and how many did."""
    llm.engine.add_request("x", _tokens(llm, "hi"), params(LONG, seed=seed, max_tokens=120))
    output, num_failures = None, 0
    while llm.engine.has_unfinished:
        try:
            output = next(iter(llm.engine.step()), output)
        except RuntimeError:
            num_failures += 1
    assert output is not None and output.finished
    return output.outputs[0].text, num_failures
