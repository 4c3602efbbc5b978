"""Outputs have completions, log probabilities, growing text and finish reasons, and survive errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, RequestOutputKind, SamplingParams
from piecegraph.errors import RequestError
from piecegraph.runner.common.logprobs import Logprob, PromptLogprobs
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.output.async_output import AsyncOutput
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.chunking_llm import chunking_llm
from tests.runner.margin_rule import assert_same_tokens

TOKENIZER = byte_tokenizer()
EOS = 1
PROMPT = [40, 41, 42, 40, 43, 60, 61, 62, 63, 64, 40, 9, 8]  # more than a step of the fixture holds
A, B, C = (TOKENIZER(letter)["input_ids"][0] for letter in "abc")

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
RANDOM = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True, seed=11)
LETTERS = replace(RANDOM, temperature=5.0, allowed_token_ids=[A, B, C])
"""Its text is a's, b's and c's, in no order."""


@pytest.fixture(scope="module", params=[False, True], ids=["in-step", "ahead"])
def llm(llama_dir: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with chunking_llm(llama_dir, is_ahead=request.param) as llm:
        yield llm


def ask(llm: LLM, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params)
    return output


def drive(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Step to the end, as a server would; every output by request."""
    seen: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
    return seen


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' log probabilities `[len(tokens), vocab_size]`: row i is of what follows token i."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.float().log_softmax(-1)


def assert_logprobs(found: dict[int, Logprob], reference: torch.Tensor, token: int, wanted: int) -> None:
    """`found` holds `token` first and the `wanted` likeliest (-1: all), with the values of `reference`, their ranks
    and texts."""
    assert next(iter(found)) == token
    num_likeliest = len(reference) if wanted == -1 else wanted
    assert {*found} == {token, *reference.topk(num_likeliest).indices.tolist()}
    for one, value in found.items():
        assert value.logprob == pytest.approx(float(reference[one]), abs=1e-4)
        assert value.decoded_token == TOKENIZER.decode([one])
        at_least = [int((reference >= reference[one] + offset).sum()) for offset in (1e-3, -1e-3)]
        assert value.rank is not None and at_least[0] < value.rank <= at_least[1]


@pytest.mark.parametrize("wanted", [0, 3, -1])
def test_logprobs_are_those_of_the_model(llm: LLM, llama: PreTrainedModel, wanted: int) -> None:
    """Before temperature, penalties and biases; the token itself always, and their sum."""
    params = replace(RANDOM, logprobs=wanted, max_tokens=8, presence_penalty=1.0, logit_bias={A: 4.0}, top_k=50)
    completion = ask(llm, params).outputs[0]
    assert completion.logprobs is not None
    reference = reference_logprobs(llama, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
    for step, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert_logprobs(found, reference[step], token, wanted)
    own = sum(found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(own)


@pytest.mark.parametrize("wanted", [0, 3, -1])
def test_prompt_logprobs_are_those_of_the_model(llm: LLM, llama: PreTrainedModel, wanted: int) -> None:
    """Over several chunks; none for the first token, which nothing predicts. A cached prefix hides none of them,
    nor do other requests in the same steps."""
    prompt = PROMPT * 2
    params = [replace(GREEDY, prompt_logprobs=wanted), GREEDY, replace(RANDOM, prompt_logprobs=1, logprobs=2)]
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 3, params)
        reference = reference_logprobs(llama, prompt)
        for output, count in ((outputs[0], wanted), (outputs[2], 1)):
            found = output.prompt_logprobs
            assert found is not None and found[0] is None and len(found) == len(prompt)
            for at in range(1, len(prompt)):
                one = found[at]
                assert one is not None
                assert_logprobs(one, reference[at - 1], prompt[at], count)
        assert outputs[1].prompt_logprobs is None
        assert_same_tokens(llama, prompt, outputs[0].outputs[0].token_ids)


def test_no_logprobs_unless_asked_for(llm: LLM) -> None:
    output = ask(llm, GREEDY)
    assert (output.prompt_logprobs, output.outputs[0].logprobs) == (None, None)
    assert output.outputs[0].cumulative_logprob is None


def test_several_completions_are_one_output(llm: LLM) -> None:
    """Each completion has its index, tokens, text, log probabilities and end, in `generate` and in a stream."""
    params = replace(RANDOM, n=3, logprobs=1, prompt_logprobs=0)
    output = ask(llm, params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for completion in output.outputs:
        assert len(completion.token_ids) == len(completion.logprobs or ()) == 24
        assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.finish_reason == "length"
    *before, last = llm.stream({"prompt_token_ids": PROMPT}, params)
    assert last == replace(output, request_id=last.request_id)
    assert all(len(one.outputs) == 3 and not one.finished for one in before)


def test_completions_end_one_by_one(llm: LLM) -> None:
    """A finished completion does not change while the others continue; the output finishes with the last one."""
    params = replace(LETTERS, n=3, stop="cab", max_tokens=40)
    ended: dict[int, Any] = {}
    for output in llm.stream({"prompt_token_ids": PROMPT}, params):
        for completion in output.outputs:
            if completion.finish_reason is not None:
                assert ended.setdefault(completion.index, completion) == completion
        assert output.finished == (len(ended) == 3)
    assert len({len(completion.token_ids) for completion in ended.values()}) > 1


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_stop_string_ends_the_text_wherever_tokens_end(llm: LLM, length: int, include: bool) -> None:
    """Its first occurrence, of as many tokens as it has letters; what streams out is never taken back."""
    free = ask(llm, LETTERS).outputs[0]
    stop = free.text[7 : 7 + length]
    end = free.text.index(stop) + length
    params = replace(LETTERS, stop=["nope", stop], include_stop_str_in_output=include)
    completion = ask(llm, params).outputs[0]
    assert completion.text == free.text[: end if include else end - length]
    assert completion.token_ids == free.token_ids[:end]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    seen = [output.outputs[0] for output in llm.stream({"prompt_token_ids": PROMPT}, params)]
    assert seen[-1] == completion
    assert all(completion.text.startswith(one.text) for one in seen)


def test_a_stop_string_inside_a_token(llm: LLM) -> None:
    """The text ends before it, in the middle of what the token writes."""
    the = TOKENIZER("the")["input_ids"]
    assert len(the) == 1
    params = replace(GREEDY, logit_bias={the[0]: 1e4}, stop="ethe")
    completion = ask(llm, params).outputs[0]
    assert (completion.text, completion.token_ids) == ("th", the * 2)
    completion = ask(llm, replace(params, include_stop_str_in_output=True, stop="et")).outputs[0]
    assert (completion.text, completion.token_ids) == ("thet", the * 2)


def test_no_stop_string_counts_before_min_tokens(llm: LLM) -> None:
    free = ask(llm, LETTERS).outputs[0]
    for min_tokens in (1, 5, 10):
        completion = ask(llm, replace(LETTERS, stop=["a", "b", "c"], min_tokens=min_tokens)).outputs[0]
        assert len(completion.token_ids) == min_tokens + 1
        assert completion.text == free.text[:min_tokens]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_tokens_text_is_hidden_unless_asked_for(llm: LLM, include: bool) -> None:
    """The text is the same from `generate` and from a stream. EOS writes nothing in either case."""
    free = ask(llm, LETTERS).outputs[0]
    end = free.token_ids.index(C)
    params = replace(LETTERS, stop_token_ids=[C], include_stop_str_in_output=include)
    completion = ask(llm, params).outputs[0]
    assert completion.text == free.text[: end + include]
    assert completion.token_ids == free.token_ids[: end + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", C)
    *_, last = llm.stream({"prompt_token_ids": PROMPT}, params)
    assert last.outputs == [completion]
    ended = replace(GREEDY, ignore_eos=False, logit_bias={EOS: 1e4}, include_stop_str_in_output=include)
    completion = ask(llm, ended).outputs[0]
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("", [EOS], None)


@pytest.mark.parametrize("seed", range(6))
def test_streamed_text_is_a_prefix_of_the_text_made_at_the_end(llm: LLM, seed: int) -> None:
    """For random bytes, most of them no text at all, and for whole characters of several bytes."""
    params = replace(RANDOM, temperature=50.0, seed=seed, max_tokens=40)
    if seed % 2:  # € is three bytes; its first two alone are no character
        params = replace(params, allowed_token_ids=[*TOKENIZER("€")["input_ids"], A])
    text = ask(llm, params).outputs[0].text
    seen = [output.outputs[0] for output in llm.stream({"prompt_token_ids": PROMPT}, params)]
    assert seen[-1].text == text == TOKENIZER.decode(seen[-1].token_ids, skip_special_tokens=True)
    assert all(later.text.startswith(earlier.text) for earlier, later in pairwise(seen))
    assert len({one.text for one in seen}) > 5  # it does stream
    assert "\ufffd" in text


def test_without_detokenize_there_is_no_text(llm: LLM) -> None:
    completion = ask(llm, replace(GREEDY, detokenize=False)).outputs[0]
    assert (completion.text, completion.token_ids) == ("", ask(llm, GREEDY).outputs[0].token_ids)


def test_special_tokens_are_skipped_unless_asked_for(llm: LLM) -> None:
    params = replace(GREEDY, logit_bias={EOS: 1e4}, max_tokens=2)
    assert ask(llm, params).outputs[0].text == ""
    assert ask(llm, replace(params, skip_special_tokens=False)).outputs[0].text == "</s></s>"


def test_aborting_ends_every_completion(llm: LLM) -> None:
    """An aborted completion keeps its tokens, and a finished one its reason. Blocks are freed; others lose nothing."""
    engine = llm.engine
    free = engine.stats.num_free_blocks
    engine.add_request("mine", PROMPT, replace(LETTERS, n=3, stop_token_ids=[C], max_tokens=60))
    engine.add_request("other", PROMPT, GREEDY)
    told: RequestOutput | None = None
    while told is None or len({one.finish_reason for one in told.outputs}) == 1:
        for output in engine.step():
            told = output if output.request_id == "mine" else told
    assert not told.finished
    aborted = engine.abort("mine")
    assert aborted is not None and aborted.finished
    for before, after in zip(told.outputs, aborted.outputs, strict=True):
        assert after.token_ids == before.token_ids and after.text.startswith(before.text)
        assert (before.finish_reason, after.finish_reason) in (("stop", "stop"), (None, "abort"))
    assert engine.abort("mine") is None
    assert list(engine.requests) == ["other"]
    (*_, last) = drive(engine)["other"]
    assert last.outputs[0].token_ids == ask(llm, GREEDY).outputs[0].token_ids
    assert engine.stats.num_free_blocks == free


def test_an_id_may_be_used_again_after_its_end(llm: LLM) -> None:
    """The id is free at once, though a step in flight may still compute a token for the first request."""
    engine = llm.engine
    engine.add_request("mine", PROMPT, GREEDY)
    for _ in range(4):
        engine.step()
    assert engine.abort("mine") is not None
    engine.add_request("mine", PROMPT[:5], GREEDY)
    (*_, last) = drive(engine)["mine"]
    assert last.outputs == ask(llm, GREEDY, PROMPT[:5]).outputs


def test_an_id_in_use_is_refused(llm: LLM) -> None:
    """A prompt's, and those its completions run under; the engine goes on as if nothing had been asked."""
    engine = llm.engine
    engine.add_request("mine", PROMPT, replace(RANDOM, n=2))
    engine.add_request("other/1", PROMPT, GREEDY)
    for request_id, params in (("mine", GREEDY), ("mine/1", GREEDY), ("other", replace(RANDOM, n=2))):
        with pytest.raises(RequestError, match="already running; give each its own id"):
            engine.add_request(request_id, PROMPT, params)
    assert sorted(engine.requests) == ["mine/0", "mine/1", "other/1"]
    assert sorted(drive(engine)) == ["mine", "other/1"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5] * 96, "the prompt has 96 tokens; max_model_len=96 leaves room for at most 95 and one more to generate"),
        ([5, 261], "the prompt has token id 261; ids go from 0 to 260"),
        ([5, 2.0], "the prompt has token id 2.0"),
        ([5, True], "the prompt has token id True; ids are whole numbers"),
    ],
)
def test_a_request_that_can_never_run_is_refused(llm: LLM, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.engine.add_request("mine", prompt, GREEDY)
    assert not llm.engine.has_unfinished


def test_tokens_may_be_numbers_of_numpy_and_torch(llm: LLM) -> None:
    """Such tokens are answered like plain integers, and are returned as plain integers."""
    expected = ask(llm, GREEDY)
    for kind, tokens in (("array", np.array(PROMPT)), ("tensor", torch.tensor(PROMPT)), ("items", [*np.array(PROMPT)])):
        llm.engine.add_request(kind, tokens, GREEDY)  # type: ignore[arg-type]
        output = drive(llm.engine)[kind][-1]
        assert (output.prompt_token_ids, output.outputs) == (PROMPT, expected.outputs)
        assert {type(token) for token in output.prompt_token_ids} == {int}


def test_the_longest_prompt_gets_one_token(llm: LLM) -> None:
    completion = ask(llm, replace(GREEDY, max_tokens=None), [5] * 95).outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


def test_lower_priorities_go_first(llama_dir: Path) -> None:
    """The lowest of the waiting priorities goes first; equal ones go in order of arrival."""
    with LLM(
        llama_dir, dtype="float32", compiler="eager", max_num_seqs=1, num_kv_blocks=16, async_scheduling=False
    ) as llm:
        engine = llm.engine
        for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
            engine.add_request(name, PROMPT, replace(GREEDY, max_tokens=2), priority=priority)
        assert list(drive(engine)) == ["c", "e", "a", "d", "b"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("owner", "method"), [(ModelRunner, "execute_model"), (ModelRunner, "sample_tokens"), (AsyncOutput, "get")]
)
@pytest.mark.parametrize("at", [1, 4, 8])
def test_an_error_in_a_step_loses_no_token(
    llm: LLM,
    llama: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    at: int,
    error: type[BaseException],
) -> None:
    """Whoever steps on gets the tokens that were to come, after those told already: in a chunk or between tokens,
    before the model ran, after it, or while waiting for it."""
    engine = llm.engine
    prompts = {"a": PROMPT, "b": PROMPT[3:] * 2, "c": [7, 8]}
    calls = 0
    real: Callable[..., Any] = getattr(owner, method)

    def once_broken(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error("unplugged")
        return real(*arguments, **options)

    for name, prompt in prompts.items():
        engine.add_request(name, prompt, replace(GREEDY, logprobs=1))
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, once_broken)
        told: dict[str, list[int]] = {name: [] for name in prompts}
        with pytest.raises(error, match="unplugged"):
            _drive_forever(engine, told)
        seen = drive(engine)
    for name, prompt in prompts.items():
        completion = seen[name][-1].outputs[0]
        assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.token_ids[: len(told[name])] == told[name]
        assert [next(iter(found)) for found in completion.logprobs or ()] == completion.token_ids
        assert len(completion.token_ids) == 10
        assert_same_tokens(llama, prompt, completion.token_ids)
    assert engine.stats.num_free_blocks == 64


def test_an_error_in_generate_ends_its_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests end, since nobody could read their outputs; a server's requests in the same engine continue."""
    llm.engine.add_request("mine", PROMPT, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "execute_model", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x", "y"], GREEDY)
    assert list(llm.engine.requests) == ["mine"]
    (*_, last) = drive(llm.engine)["mine"]
    assert last.outputs == ask(llm, GREEDY).outputs


def _drive_forever(engine: Engine, told: dict[str, list[int]]) -> None:
    """Step until an error comes; `told` keeps the tokens of each request so far."""
    while True:
        told |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}


def _interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


class _Terminal:
    """A stderr that is a terminal, and what was written to it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass


def test_progress_is_shown_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished prompts of all, and tokens per second, on stderr; nothing if it is no terminal or not wanted."""
    monkeypatch.setenv("TERM", "xterm")
    for use_tqdm in (True, False):
        terminal = _Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        llm.generate(["x", "y"], GREEDY, use_tqdm=use_tqdm)
        if use_tqdm:
            assert "2/2" in terminal.written and "tokens/s" in terminal.written
        else:
            assert terminal.written == ""


def test_no_progress_without_a_terminal(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("x", GREEDY)
    assert capsys.readouterr() == ("", "")


def test_deltas_of_a_stream_are_the_whole(llm: LLM) -> None:
    """Deltas of several completions with a stop string add up in tokens, text and log probabilities."""
    params = replace(LETTERS, n=2, stop="cab", logprobs=1, prompt_logprobs=0, max_tokens=20)
    whole = ask(llm, params)
    texts = ["", ""]
    tokens: list[list[int]] = [[], []]
    rows: list[list[list[int]]] = [[], []]
    prompts: list[PromptLogprobs | None] = []
    params.output_kind = RequestOutputKind.DELTA
    for output in llm.stream({"prompt_token_ids": PROMPT}, params):
        prompts.append(output.prompt_logprobs)
        for one in output.outputs:
            texts[one.index] += one.text
            tokens[one.index] += one.token_ids
            rows[one.index] += [list(row) for row in one.logprobs or ()]
    assert texts == [one.text for one in whole.outputs]
    assert tokens == [one.token_ids for one in whole.outputs]
    assert rows == [[list(row) for row in one.logprobs or ()] for one in whole.outputs]
    assert [len(found) for found in prompts if found is not None] == [len(PROMPT)]
    params.output_kind = RequestOutputKind.FINAL_ONLY
    (last,) = llm.stream({"prompt_token_ids": PROMPT}, params)
    assert [one.token_ids for one in last.outputs] == tokens


def test_a_request_keeps_the_parameters_it_was_given(llm: LLM) -> None:
    params = replace(GREEDY)
    stream = llm.stream({"prompt_token_ids": PROMPT}, params)
    params.max_tokens, params.temperature = 1, 2.0
    assert [*stream][-1].outputs == ask(llm, GREEDY).outputs


def test_a_prompt_is_cut_at_its_start(llm: LLM) -> None:
    """To as many tokens as asked for, or as many as fit."""
    cut = ask(llm, replace(GREEDY, truncate_prompt_tokens=4))
    assert (cut.prompt_token_ids, cut.outputs) == (PROMPT[-4:], ask(llm, GREEDY, PROMPT[-4:]).outputs)
    assert len(ask(llm, replace(GREEDY, truncate_prompt_tokens=-1), [5] * 300).prompt_token_ids) == 95


@pytest.mark.parametrize("params", [5, "x", {"temperature": 0}, [None], [{}]])
def test_values_that_are_not_parameters_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=r"sampling_params.* must be SamplingParams, one or one per prompt"):
        llm.generate({"prompt_token_ids": PROMPT}, params)


@pytest.mark.parametrize(("name", "value"), [("logprobs", 262), ("prompt_logprobs", 10**20)])
def test_no_more_logprobs_than_there_are_tokens(llm: LLM, name: str, value: int) -> None:
    with pytest.raises(RequestError, match=f"{name}={value}; it must be at most max_logprobs=261"):
        ask(llm, replace(GREEDY, **{name: value}))  # type: ignore[arg-type]
