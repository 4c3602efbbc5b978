"""Tokens become text, log probabilities and an end; of several completions each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piecegraph.runner.async_output import PromptLogprobs, TokenLogprobs
from piecegraph.runner.output_processor import Finish, OutputProcessor
from piecegraph.runner.outputs import RequestOutput
from piecegraph.runner.sampling_params import SamplingParams
from piecegraph.runner.scheduling.request import Request
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = 1
A, B, C = (TOKENIZER(letter)["input_ids"][0] for letter in "abc")


def make_request(params: SamplingParams, request_id: str = "0", *, max_total_tokens: int = 90) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=TOKENIZER("xyz")["input_ids"],
        sampling_params=params,
        seed=0,
        max_total_tokens=max_total_tokens,
        arrival=0,
    )


class Processed:
    """A processor with one prompt, driven as the engine drives it."""

    def __init__(
        self, params: SamplingParams, *, num_completions: int = 1, is_final_only: bool = False, max_total: int = 90
    ) -> None:
        self.processor = OutputProcessor(TOKENIZER, [EOS])
        self.requests = [make_request(params, str(i), max_total_tokens=max_total) for i in range(num_completions)]
        self.processor.add("mine", "xyz", self.requests, is_final_only=is_final_only)

    def take(self, token: int, completion: int = 0, logprobs: TokenLogprobs | None = None) -> Finish | None:
        """Give a completion a token, and end it if it ends with that."""
        request = self.requests[completion]
        request.output_token_ids.append(token)
        finish = self.processor.take_token(request, logprobs)
        if finish is not None:
            self.end(completion, *finish)
        return finish

    def end(self, completion: int, reason: str, stop_reason: int | str | None = None) -> None:
        request = self.requests[completion]
        request.finish_reason, request.stop_reason = reason, stop_reason
        self.processor.finish(request)

    def output(self) -> RequestOutput:
        output = self.processor.output("mine")
        assert output is not None
        return output


def test_it_knows_what_is_unfinished() -> None:
    processed = Processed(SamplingParams(n=2), num_completions=2)
    processor = processed.processor
    assert "mine" in processor and len(processor) == 1
    assert processor.request_ids("mine") == ("0", "1")
    assert processed.take(EOS, completion=0) == Finish("stop")
    assert processor.request_ids("mine") == ("1",)
    assert not processed.output().finished
    processed.end(1, "abort")
    output = processed.output()
    assert [completion.finish_reason for completion in output.outputs] == ["stop", "abort"]
    assert output.finished and "mine" not in processor and len(processor) == 0


def test_an_output_stays_as_it_was_given() -> None:
    """Later tokens change no earlier output."""
    processed = Processed(SamplingParams(logprobs=0, prompt_logprobs=0))
    processed.take(A, logprobs=TokenLogprobs([A], [-0.5], 1))
    first = processed.output()
    processed.processor.take_prompt_logprobs("0", PromptLogprobs(1, [TokenLogprobs([7], [-1.0], 1)]))
    processed.take(B, logprobs=TokenLogprobs([B], [-0.25], 1))
    second = processed.output()
    assert (first.outputs[0].token_ids, first.outputs[0].text) == ([A], "a")
    assert (first.outputs[0].logprobs, first.outputs[0].cumulative_logprob) == ([{A: -0.5}], -0.5)
    assert first.prompt_logprobs == [None, None, None]
    assert (second.outputs[0].token_ids, second.outputs[0].text) == ([A, B], "ab")
    assert second.outputs[0].cumulative_logprob == -0.75
    assert second.prompt_logprobs == [None, {7: -1.0}, None]


@pytest.mark.parametrize(
    ("options", "token", "finish", "text"),
    [
        ({}, EOS, Finish("stop"), "a"),
        ({"ignore_eos": True}, EOS, None, "a"),
        ({"ignore_eos": True, "skip_special_tokens": False}, EOS, None, "a</s>"),
        ({"stop_token_ids": [B]}, B, Finish("stop", B), "a"),
        ({"stop_token_ids": [B], "include_stop_str_in_output": True}, B, Finish("stop", B), "ab"),
        ({"stop_token_ids": [EOS]}, EOS, Finish("stop"), "a"),  # EOS is EOS, however often it is named
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, Finish("stop", EOS), "a"),
        ({"stop": "ab"}, B, Finish("stop", "ab"), ""),
        ({"stop": "b", "include_stop_str_in_output": True}, B, Finish("stop", "b"), "ab"),
        ({"detokenize": False}, B, None, ""),
        ({}, B, None, "ab"),
    ],
)
@pytest.mark.parametrize("is_final_only", [False, True])
def test_what_ends_a_completion_and_what_it_leaves(
    options: dict[str, object], token: int, finish: Finish | None, text: str, is_final_only: bool
) -> None:
    """The same whether its text was made token by token or at the end."""
    processed = Processed(SamplingParams(**options), is_final_only=is_final_only)  # type: ignore[arg-type]
    assert processed.take(A) is None
    assert processed.take(token) == finish
    if finish is None:
        processed.end(0, "abort")
    (completion,) = processed.output().outputs
    assert (completion.text, completion.token_ids) == (text, [A, token])


def test_the_last_token_that_fits_ends_it() -> None:
    """Unless it ends with that token anyway."""
    processed = Processed(SamplingParams(), max_total=5)
    assert processed.take(A) is None
    assert processed.take(B) == Finish("length")
    processed = Processed(SamplingParams(), max_total=5)
    assert [processed.take(A), processed.take(EOS)] == [None, Finish("stop")]


def test_a_caller_who_wants_the_end_only_gets_that() -> None:
    processed = Processed(SamplingParams(), is_final_only=True)
    assert processed.take(A) is None
    assert processed.processor.output("mine") is None
    processed.take(EOS)
    assert processed.output().outputs[0].text == "a"


def test_text_that_a_stop_string_may_take_back_is_held() -> None:
    """Until the string cannot come any more, or the completion has ended without it."""
    processed = Processed(SamplingParams(stop="abc"))
    seen = []
    for token in (A, B, A, B):
        processed.take(token)
        seen.append(processed.output().outputs[0].text)
    assert seen == ["", "", "a", "ab"]
    processed.end(0, "length")
    assert processed.output().outputs[0].text == "abab"


def test_an_incomplete_character_is_told_at_the_end() -> None:
    processed = Processed(SamplingParams())
    for token in TOKENIZER("€")["input_ids"][:2]:
        processed.take(token)
    assert processed.output().outputs[0].text == ""
    processed.end(0, "length")
    assert processed.output().outputs[0].text == "\ufffd"


def test_each_gets_as_many_logprobs_as_it_asked_for() -> None:
    """A batch computes what its most demanding request wants. The token itself is there always, and once."""
    row = TokenLogprobs([A, B, A, C], [-2.0, -1.0, -2.0, -3.0], 2)
    for wanted, found in ((0, {A: -2.0}), (1, {A: -2.0, B: -1.0}), (-1, {A: -2.0, B: -1.0, C: -3.0})):
        processed = Processed(SamplingParams(logprobs=wanted))
        processed.take(A, logprobs=row)
        assert processed.output().outputs[0].logprobs == [found]


def test_prompt_logprobs_come_in_chunks() -> None:
    """In any order, again after a preemption, and after the request has ended: then they are dropped."""
    processed = Processed(SamplingParams(prompt_logprobs=1))
    second = PromptLogprobs(2, [TokenLogprobs([9, 8], [-4.0, -0.5], 2)])
    processed.processor.take_prompt_logprobs("0", second)
    processed.processor.take_prompt_logprobs("0", PromptLogprobs(1, [TokenLogprobs([7, 8], [-1.0, -0.5], 2)]))
    processed.processor.take_prompt_logprobs("0", second)
    expected = [None, {7: -1.0, 8: -0.5}, {9: -4.0, 8: -0.5}]
    assert processed.output().prompt_logprobs == expected
    processed.end(0, "abort")
    processed.processor.take_prompt_logprobs("0", second)
    assert processed.output().prompt_logprobs == expected


def test_without_a_tokenizer_there_is_no_text() -> None:
    processor = OutputProcessor(None, [EOS])
    request = make_request(SamplingParams())
    processor.add("mine", None, [request], is_final_only=False)
    request.output_token_ids.append(A)
    assert processor.take_token(request, None) is None
    output = processor.output("mine")
    assert output is not None
    assert (output.prompt, output.outputs[0].text, output.outputs[0].token_ids) == (None, "", [A])


def test_a_step_gives_news_of_what_somebody_reads_or_what_ends() -> None:
    """Of a prompt that is read when it is finished there is none before, whatever the others of the batch do."""
    params = SamplingParams(temperature=0.0, max_tokens=4)
    processor = OutputProcessor(TOKENIZER, [EOS])
    requests = [make_request(params, name, max_total_tokens=9) for name in ("quiet", "read", "logged")]
    logged = replace(params, logprobs=0)
    requests[2].sampling_params = logged
    for request in requests:
        request.stop_token_ids = frozenset([EOS])
        processor.add(request.request_id, None, [request], is_final_only=request.request_id != "read")
    logprobs = {"logged": TokenLogprobs([70], [-1.5], 1)}

    def take(*tokens: int) -> tuple[list[str], list[str]]:
        for request, token in zip(requests, tokens, strict=True):
            request.output_token_ids.append(token)
        ended, news = processor.take_tokens(requests, logprobs)
        return [request.request_id for request, _ in ended], news

    assert take(70, 70, 70) == ([], ["read", "logged"])
    assert take(EOS, 70, 70) == (["quiet"], ["quiet", "read", "logged"])


@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_same_requests_again_end_where_they_must(has_tokens: bool) -> None:
    """Step after step of one list of requests that nobody reads: by a stop token of their own, or by length."""
    processor = OutputProcessor(TOKENIZER, [EOS])
    requests = [make_request(SamplingParams(), name, max_total_tokens=11) for name in ("stops", "runs")]
    requests[0].stop_token_ids = frozenset([B])
    for request in requests:
        processor.add(request.request_id, None, [request], is_final_only=True)

    def take(requests: list[Request], *tokens: int) -> list[tuple[str, str]]:
        for request, token in zip(requests, tokens, strict=True):
            request.output_token_ids.append(token)
        ended, news = processor.take_tokens(requests, {}, tokens if has_tokens else None)
        assert news == [request.request_id for request, _ in ended]
        return [(request.request_id, finish.reason) for request, finish in ended]

    assert [take(requests, A, token) for token in (A, B, A, B)] == [[]] * 4  # B ends the other only
    requests[0].stop_token_ids, requests[0].sampling_params = frozenset([B]), SamplingParams(stop_token_ids=[B])
    assert take(requests, B, A) == [("stops", "stop")]
    rest = requests[1:]
    assert [take(rest, A) for _ in range(3)] == [[], [], [("runs", "length")]]
