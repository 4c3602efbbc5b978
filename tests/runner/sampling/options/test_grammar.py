"""What a grammar forbids is not drawn; requests without one draw what they would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.runner.output.async_output import AsyncOutput
from piecegraph.runner.sampling.options.grammar import GrammarOutput, apply_grammar
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from tests.runner.test_graphs import load

VOCAB_SIZE = 70  # three words, the last not full
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def only(*rows: tuple[int, ...], vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """A bitmask with these tokens of each row."""
    words = torch.zeros(len(rows), -(-vocab_size // 32), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        for token in tokens:
            words[row, token // 32] |= 1 << (token % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_allowed_tokens_are_left(device: str, dtype: torch.dtype) -> None:
    """In the rows of its requests, in whatever order they are named; `logits` themselves stay."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    before = logits.clone()
    grammar = GrammarOutput(bitmask=only((31, 69), (0,)), request_ids=("c", "a"))
    found = apply_grammar(logits, grammar, ["a", "b", "c"])
    expected = torch.full((3, VOCAB_SIZE), float("-inf"), device=device)
    expected[0, 0], expected[1], expected[2, [31, 69]] = (
        before[0, 0].float(),
        before[1].float(),
        before[2, [31, 69]].float(),
    )
    assert torch.equal(found, expected)
    assert torch.equal(logits, before)


def test_a_request_may_have_several_rows() -> None:
    """As with drafts; they are those of its rows of logits in their order."""
    logits = torch.zeros(4, VOCAB_SIZE)
    grammar = GrammarOutput(bitmask=only((7,), (1,), (2,), (3,)), request_ids=("b", "a", "a", "a"))
    found = apply_grammar(logits, grammar, ["a", "a", "a", "b"])
    assert found.argmax(1).tolist() == [1, 2, 3, 7] and (found > float("-inf")).sum() == 4


def test_a_grammar_without_requests_changes_nothing() -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    assert torch.equal(apply_grammar(logits, GrammarOutput(bitmask=only(), request_ids=()), ["a", "b"]), logits)


@pytest.mark.parametrize(
    ("bitmask", "request_ids", "message"),
    [
        (torch.zeros(1, 3), ("a",), "bitmask is torch.float32 of shape (1, 3); give int32,"),
        (only((1,)), ("a", "b"), "of shape (1, 3); give int32, a row for each of 2 request ids"),
        (only((1,), (2,)), ("a", "a"), "grammar for ['a'] with another number of rows"),
        (only((1,), vocab_size=64), ("a",), "2 words a row; 70 tokens need 3"),
        (only((1,)), ("z",), "grammar for ['z'], which this step does not run"),
    ],
)
def test_a_mask_that_does_not_fit_the_step_is_refused(
    bitmask: torch.Tensor, request_ids: tuple[str, ...], message: str
) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        apply_grammar(torch.zeros(1, VOCAB_SIZE), GrammarOutput(bitmask=bitmask, request_ids=request_ids), ["a"])


@pytest.fixture(scope="module", params=DEVICES)
def graphed(request: pytest.FixtureRequest, llama_dir: Path) -> Iterator[LLM]:
    with load(llama_dir, device=request.param) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_of_one_token_makes_that_the_answer(
    graphed: LLM, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own request, step after step, and the model goes on from it; another's answer is what it is without."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=6, ignore_eos=True, logprobs=0)
    plain = answers(graphed, params)
    runner, (execute, sample) = graphed.runner, (graphed.runner.execute_model, graphed.runner.sample_tokens)
    steps: list[SchedulerOutput] = []

    def executed(output: SchedulerOutput) -> None:
        steps.append(output)
        execute(output)

    def sampled(grammar_output: None) -> AsyncOutput:
        ids = tuple(item.request_id for item in steps[-1].scheduled if item.request_id == "masked")
        mask = only(*((40 + len(steps),) for _ in ids), vocab_size=graphed.engine.vocab_size)
        return sample(GrammarOutput(bitmask=mask, request_ids=ids))

    monkeypatch.setattr(runner, "execute_model", executed)
    monkeypatch.setattr(runner, "sample_tokens", sampled)
    found = answers(graphed, params)
    first = found["masked"][0]
    assert found["masked"] == list(range(first, first + 6)) and first > 40
    assert found["free"] == plain["free"]
    assert plain["masked"] != found["masked"]


def answers(llm: LLM, params: SamplingParams) -> dict[str, list[int]]:
    """The tokens of two requests that run together."""
    for request_id, prompt in (("masked", [5, 6, 7]), ("free", [9, 10, 11, 12])):
        llm.engine.add_request(request_id, prompt, params)
    tokens = {}
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens
