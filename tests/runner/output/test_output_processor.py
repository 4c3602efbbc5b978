"""Tokens become text, log probabilities and an end; of several completions each by itself."""

from __future__ import annotations

import copy
import pickle
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from piecegraph.runner.common.logprobs import FlatLogprobs, Logprob
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.common.sampling_params import RequestOutputKind, SamplingParams
from piecegraph.runner.output.async_output import PromptLogprobs, TokenLogprobs
from piecegraph.runner.output.outbox import Outbox
from piecegraph.runner.output.output_processor import OutputProcessor
from piecegraph.runner.output.prompt_state import Finish, PromptState
from piecegraph.runner.scheduling.request import Request
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = 1
A, B, C = (TOKENIZER(letter)["input_ids"][0] for letter in "abc")


def follow(
    processor: OutputProcessor, request_id: str, requests: list[Request], *, is_final_only: bool = False
) -> PromptState:
    """Have it follow a prompt; what there is news of goes to the prompt's `outbox`."""
    prompt = processor.prompt_state(request_id, "xyz", requests, is_final_only=is_final_only, outbox=Outbox())
    processor.add(prompt)
    return prompt


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
        self.prompt = follow(self.processor, "mine", self.requests, is_final_only=is_final_only)

    def take(self, token: int, completion: int = 0, logprobs: TokenLogprobs | None = None) -> Finish | None:
        """Give a completion a token, and end it if it ends with that."""
        request = self.requests[completion]
        request.output_token_ids.append(token)
        finish = self.processor.take_token(request, logprobs)
        if finish is not None:
            self.end(completion, *finish)
        return finish

    def end(self, completion: int, reason: str, stop_reason: int | str | None = None, error: str | None = None) -> None:
        request = self.requests[completion]
        self.processor.finish(request, Finish(reason, stop_reason, error))
        self.processor.forget(request)

    def output(self) -> RequestOutput:
        made = self.processor.output(self.prompt, self.prompt.delivered)
        assert made is not None
        self.prompt.delivered = made.delivered
        return made.output


def test_unfinished_requests_are_listed() -> None:
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
    assert (first.outputs[0].logprobs, first.outputs[0].cumulative_logprob) == ([{A: Logprob(-0.5, 1, "a")}], -0.5)
    assert first.prompt_logprobs == [None, None, None]
    assert (second.outputs[0].token_ids, second.outputs[0].text) == ([A, B], "ab")
    assert second.outputs[0].cumulative_logprob == -0.75
    assert second.prompt_logprobs == [None, {7: Logprob(-1.0, 1, str(TOKENIZER.decode([7])))}, None]


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
def test_each_finish_reason_leaves_its_text(
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


def test_the_maximum_length_ends_a_completion() -> None:
    """Unless it ends with that token anyway."""
    processed = Processed(SamplingParams(), max_total=5)
    assert processed.take(A) is None
    assert processed.take(B) == Finish("length")
    processed = Processed(SamplingParams(), max_total=5)
    assert [processed.take(A), processed.take(EOS)] == [None, Finish("stop")]


def test_a_caller_who_wants_the_end_only_gets_that() -> None:
    processed = Processed(SamplingParams(), is_final_only=True)
    assert processed.take(A) is None
    assert not processed.prompt.outbox
    processed.take(EOS)
    assert list(processed.prompt.outbox.news) == [processed.prompt]
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


def test_an_incomplete_character_is_delivered_at_the_end() -> None:
    processed = Processed(SamplingParams())
    for token in TOKENIZER("€")["input_ids"][:2]:
        processed.take(token)
    assert processed.output().outputs[0].text == ""
    processed.end(0, "length")
    assert processed.output().outputs[0].text == "\ufffd"


def test_each_request_gets_the_number_of_logprobs_it_asked_for() -> None:
    """A batch computes what its most demanding request wants. The token itself is there always, and once."""
    row = TokenLogprobs([A, B, A, C], [-2.0, -1.0, -2.0, -3.0], 2)
    first, second, third = Logprob(-2.0, 2, "a"), Logprob(-1.0, 1, "b"), Logprob(-3.0, 3, "c")
    for wanted, found in ((0, {A: first}), (1, {A: first, B: second}), (-1, {A: first, B: second, C: third})):
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
    text = [str(TOKENIZER.decode([token])) for token in range(10)]
    best = Logprob(-0.5, 1, text[8])
    expected = [None, {7: Logprob(-1.0, 2, text[7]), 8: best}, {9: Logprob(-4.0, 2, text[9]), 8: best}]
    assert processed.output().prompt_logprobs == expected
    processed.end(0, "abort")
    processed.processor.take_prompt_logprobs("0", second)
    assert processed.output().prompt_logprobs == expected


def test_without_a_tokenizer_there_is_no_text() -> None:
    processor = OutputProcessor(None, [EOS])
    request = make_request(SamplingParams())
    prompt = follow(processor, "mine", [request])
    request.output_token_ids.append(A)
    assert processor.take_token(request, None) is None
    made = processor.output(prompt, prompt.delivered)
    assert made is not None
    output = made.output
    assert (output.prompt, output.outputs[0].text, output.outputs[0].token_ids) == ("xyz", "", [A])


def test_a_step_gives_news_of_requests_that_are_read_or_end() -> None:
    """Of a prompt that is read when it is finished there is none before, whatever the others of the batch do."""
    params = SamplingParams(temperature=0.0, max_tokens=4)
    processor = OutputProcessor(TOKENIZER, [EOS])
    requests = [make_request(params, name, max_total_tokens=9) for name in ("quiet", "read", "logged")]
    logged = replace(params, logprobs=0)
    requests[2].sampling_params = logged
    for request in requests:
        request.stop_token_ids = frozenset([EOS])
        follow(processor, request.request_id, [request], is_final_only=request.request_id != "read")
    logprobs = {"logged": TokenLogprobs([70], [-1.5], 1)}

    def take(*tokens: int) -> tuple[list[str], list[str]]:
        for request, token in zip(requests, tokens, strict=True):
            request.output_token_ids.append(token)
        ended, news = processor.take_tokens(requests, logprobs)
        return [request.request_id for request, _ in ended], news

    assert take(70, 70, 70) == ([], ["read", "logged"])
    assert take(EOS, 70, 70) == (["quiet"], ["quiet", "read", "logged"])


@pytest.mark.parametrize("has_tokens", [True, False])
def test_repeated_steps_of_the_same_requests_end_them_in_time(has_tokens: bool) -> None:
    """Step after step of one list of requests that nobody reads: by a stop token of their own, or by length."""
    processor = OutputProcessor(TOKENIZER, [EOS])
    requests = [make_request(SamplingParams(), name, max_total_tokens=11) for name in ("stops", "runs")]
    requests[0].stop_token_ids = frozenset([B])
    for request in requests:
        follow(processor, request.request_id, [request], is_final_only=True)

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


def delta_outputs(params: SamplingParams, tokens: list[int]) -> list[RequestOutput]:
    """One output for each token, and a last one for the end."""
    processed = Processed(params)
    made = []
    for token in tokens:
        row = TokenLogprobs([token, B], [-0.5, -0.25], 2) if params.logprobs is not None else None
        has_ended = processed.take(token, logprobs=row) is not None
        made.append(processed.output())
        if has_ended:
            return made
    processed.end(0, "length")
    return [*made, processed.output()]


def test_deltas_together_are_the_whole() -> None:
    """Text, tokens and log probabilities, with stop strings and characters that come in parts; the sum of log
    probabilities is of all so far, and the prompt's are told once."""
    text = "ab€cabc"
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, stop="xyz", logprobs=0, prompt_logprobs=0)
    deltas = delta_outputs(params, TOKENIZER(text)["input_ids"])
    completions = [delta.outputs[0] for delta in deltas]
    assert "".join(one.text for one in completions) == text
    assert [token for one in completions for token in one.token_ids] == TOKENIZER(text)["input_ids"]
    assert [len(one.token_ids) for one in completions] == [1] * (len(deltas) - 1) + [0]
    assert [len(one.logprobs or ()) for one in completions] == [1] * (len(deltas) - 1) + [0]
    assert [one.cumulative_logprob for one in completions][-2:] == [-0.5 * (len(deltas) - 1)] * 2
    assert [delta.prompt_logprobs is None for delta in deltas] == [False] + [True] * (len(deltas) - 1)
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_a_delta_has_the_completions_with_news() -> None:
    """None of them: no output. What was made and not handed over counts as delivered."""
    processed = Processed(SamplingParams(n=2, output_kind=RequestOutputKind.DELTA), num_completions=2)
    processed.take(A, completion=1)
    (only,) = processed.output().outputs
    assert (only.index, only.text, only.token_ids) == (1, "a", [A])
    assert processed.processor.output(processed.prompt, processed.prompt.delivered) is None
    processed.take(EOS, completion=0)
    processed.take(B, completion=1)
    assert [(one.index, one.text, one.finish_reason) for one in processed.output().outputs] == [
        (0, "", "stop"),
        (1, "b", None),
    ]
    processed.end(1, "abort")
    assert [(one.index, one.text, one.token_ids) for one in processed.output().outputs] == [(1, "", [])]


def test_final_only_is_one_output() -> None:
    assert Processed(SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)).prompt.is_final_only
    assert not Processed(SamplingParams()).prompt.is_final_only


def test_flat_logprobs_hold_the_same_values() -> None:
    """Of outputs and prompts; a prompt's first position has none."""
    found = {}
    for is_flat in (False, True):
        processed = Processed(SamplingParams(logprobs=1, prompt_logprobs=1, flat_logprobs=is_flat))
        rows = [TokenLogprobs([7, 8], [-1.0, -0.5], 2), TokenLogprobs([8, 8], [-0.5, -0.5], 1)]
        processed.processor.take_prompt_logprobs("0", PromptLogprobs(1, rows))
        for token in (A, B):
            processed.take(token, logprobs=TokenLogprobs([token, B, C], [-2.0, -1.0, -3.0], 2))
        output = processed.output()
        found[is_flat] = output.prompt_logprobs, output.outputs[0].logprobs
    assert all(isinstance(one, FlatLogprobs) for one in found[True])
    assert [list(one or ()) for one in found[True]] == [[row or {} for row in one or ()] for one in found[False]]
    flat = found[True][1]
    assert isinstance(flat, FlatLogprobs) and flat.ranks == [2, 1, 1]
    assert flat.decoded_tokens == ["a", "b", "b"]


def test_without_text_there_are_no_decoded_tokens() -> None:
    processed = Processed(SamplingParams(logprobs=0, detokenize=False))
    processed.take(A, logprobs=TokenLogprobs([A], [-2.0], 1))
    assert processed.output().outputs[0].logprobs == [{A: Logprob(-2.0, 1, None)}]


def test_unread_outputs_copy_nothing() -> None:
    """A stream's cost does not grow with its past outputs: lists are made when they are read, as they were then."""
    processed = Processed(SamplingParams(max_tokens=None, logprobs=0), max_total=9000)
    outputs = []
    for _ in range(1500):
        processed.take(A, logprobs=TokenLogprobs([A], [-0.5], 1))
        outputs.append(processed.output())
    tracemalloc.start()
    for _ in range(100):
        outputs.append(processed.output())
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 100 * 1500 * 2  # a copy of the tokens alone is 8 bytes a token, and its text one
    assert [len(output.outputs[0].token_ids) for output in outputs[:1500:300]] == [1, 301, 601, 901, 1201]
    assert len(outputs[7].outputs[0].logprobs or ()) == 8
    first = outputs[3].outputs[0]
    assert first == replace(first) == pickle.loads(pickle.dumps(first)) == copy.copy(first) == copy.deepcopy(first)
    with pytest.raises(AttributeError, match="no attribute 'token_idx'"):
        first.token_idx  # noqa: B018


def test_outputs_have_times() -> None:
    """Of the first token a step brought, and of the last that somebody reads or that ends it."""
    processor = OutputProcessor(TOKENIZER, [EOS])
    params = SamplingParams(temperature=0.0)
    requests = [make_request(params, name, max_total_tokens=7) for name in ("quiet", "read")]
    prompts = [follow(processor, one.request_id, [one], is_final_only=one.request_id == "quiet") for one in requests]
    times = []
    for token in (A, A, A, A):
        for request in requests:
            request.output_token_ids.append(token)
        ended, _ = processor.take_tokens(requests, {})
        times.append(time.monotonic())
    for request, finish in ended:
        processor.finish(request, finish)
    for prompt in prompts:
        made = processor.output(prompt, prompt.delivered)
        assert made is not None
        metrics, completion = made.output.metrics, made.output.outputs[0]
        assert metrics is not None and completion.finished() and metrics.num_generation_tokens == 4
        assert prompt.queued_ts <= metrics.first_token_ts <= times[0] < times[2] <= metrics.last_token_ts <= times[3]
        assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts >= 0
        assert abs(time.time() - metrics.arrival_time) < 60


def test_a_read_that_was_interrupted_is_repeated() -> None:
    """Tokens are copied when they are first read; an interrupt there loses none."""

    class Interrupting(list[int]):
        is_armed = True

        def __getitem__(self, index: Any) -> Any:
            if self.is_armed:
                self.is_armed = False
                raise KeyboardInterrupt
            return super().__getitem__(index)

    output = CompletionOutput.with_lazy_fields(
        lazy_fields={"token_ids": (Interrupting([5, 6, 7]), 1, 3)}, index=0, text=""
    )
    with pytest.raises(KeyboardInterrupt):
        output.token_ids  # noqa: B018
    assert output.token_ids == [6, 7]
