"""Outputs that come in parts add up to those of one process."""

from __future__ import annotations

from piecegraph.runner.common.logprobs import FlatLogprobs, Logprob
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.data_parallel.merged_output import MergedOutput


def part(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput(request_id="a", prompt=None, prompt_token_ids=[], finished=finished, outputs=list(completions))


def completion(index: int, text: str, tokens: list[int], reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=tokens,
        logprobs=[{token: Logprob(-float(token))} for token in tokens],
        cumulative_logprob=-1.0,
        finish_reason=reason,
    )


def test_parts_add_up_and_earlier_outputs_stay_as_they_were() -> None:
    """A message taken twice, as after an interrupt, counts once; a completion without news keeps what it has."""
    merged = MergedOutput("Hi", [7, 8], SamplingParams(n=2, temperature=1.0, logprobs=0))
    first = part(completion(0, "a", [1]))
    merged.take(1, first)
    merged.take(1, first)
    early = merged.output(first)
    second = part(completion(0, "b", [2, 3], "stop"), completion(1, "c", [4]))
    merged.take(5, second)
    late = merged.output(second)
    assert [(one.text, one.token_ids) for one in early.outputs] == [("a", [1]), ("", [])]
    assert [(one.text, one.token_ids) for one in late.outputs] == [("ab", [1, 2, 3]), ("c", [4])]
    assert [one.finish_reason for one in late.outputs] == ["stop", None]
    assert late.outputs[0].logprobs == [{1: Logprob(-1.0)}, {2: Logprob(-2.0)}, {3: Logprob(-3.0)}]
    assert early.outputs[1].logprobs == []
    assert (late.prompt, late.prompt_token_ids) == ("Hi", [7, 8])


def test_a_message_that_was_taken_in_part_is_completed() -> None:
    """An interrupt after the log probabilities were added, and before anything else was, adds none twice."""
    merged = MergedOutput(None, [7], SamplingParams(logprobs=0, flat_logprobs=True))
    flat = FlatLogprobs()
    flat.append({1: Logprob(-1.0)})
    delta = part(CompletionOutput(index=0, text="a", token_ids=[1], logprobs=flat), finished=True)
    rows = merged._completions[0].logprobs
    assert rows is not None
    rows.append({1: Logprob(-1.0)})
    merged.take(1, delta)
    assert merged.output(delta).outputs[0].logprobs == flat
