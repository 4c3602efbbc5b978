"""Every request gets the log probabilities of its own prompt, from the right rows of a batch, in every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.runner.output.async_output import PromptRows
from piecegraph.runner.scheduling.scheduler_output import AddedRequest, ScheduledRequest
from piecegraph.runner.step.prompt_logprobs import PromptLogprobsBatch, PromptLogprobsStates
from piecegraph.runner.step.state.request_states import RequestStates
from tests.runner.logprob_values import values_of


def added(request_id: str, prompt_len: int, prompt_logprobs: int | None) -> AddedRequest:
    return AddedRequest(
        request_id=request_id,
        token_ids=list(range(prompt_len)),
        num_prompt_tokens=prompt_len,
        num_computed_tokens=0,
        block_ids=((),),
        sampling_params=SamplingParams(prompt_logprobs=prompt_logprobs),
        seed=0,
    )


def scheduled(request_id: str, start: int, num_tokens: int) -> ScheduledRequest:
    return ScheduledRequest(request_id, num_tokens, start, False, 1)


@pytest.fixture
def states() -> PromptLogprobsStates:
    """ "a" (a prompt of 6) wants 2, "b" (of 4) all, "c" (of 5) none."""
    states = PromptLogprobsStates()
    for one in (added("a", 6, 2), added("b", 4, -1), added("c", 5, None)):
        states.add(one)
    return states


def test_the_row_before_a_token_predicts_it(states: PromptLogprobsStates) -> None:
    """The last token's own row predicts the output, and is nobody's here."""
    batch = states.batch([scheduled("a", 0, 6)])
    assert batch == PromptLogprobsBatch(rows=(PromptRows("a", 1, 5),), indices=(0, 1, 2, 3, 4), num_logprobs=2)


def test_chunked_prompts_cover_every_token(states: PromptLogprobsStates) -> None:
    chunks = [(0, 1), (1, 3), (4, 1), (5, 1)]
    found = [states.batch([scheduled("a", start, num_tokens)]) for start, num_tokens in chunks]
    assert [batch.rows if batch else () for batch in found] == [
        (PromptRows("a", 1, 1),),
        (PromptRows("a", 2, 3),),
        (PromptRows("a", 5, 1),),
        (),
    ]


def test_rows_in_a_batch_of_several(states: PromptLogprobsStates) -> None:
    """Indices count the rows of those between; the batch computes what its most demanding request wants."""
    batch = states.batch([scheduled("c", 4, 1), scheduled("b", 1, 3), scheduled("c", 0, 2), scheduled("a", 2, 2)])
    assert batch is not None
    assert batch.rows == (PromptRows("b", 2, 2), PromptRows("a", 3, 2))
    assert batch.indices == (1, 2, 6, 7)
    assert batch.num_logprobs >= 261
    assert batch.logits_indices(torch.device("cpu")).tolist() == [1, 2, 6, 7]


def test_decodes_and_requests_without_prompt_logprobs_have_no_rows(states: PromptLogprobsStates) -> None:
    assert states.batch([scheduled("a", 6, 1), scheduled("c", 0, 5)]) is None
    states.remove("a")
    states.remove("a")  # harmless
    assert states.batch([scheduled("a", 0, 6)]) is None
    assert states.batch([scheduled("b", 0, 4)]) is not None
    states.clear()
    assert states.batch([scheduled("b", 0, 4)]) is None


def test_each_row_predicts_its_requests_next_token() -> None:
    """The tokens are read on the device, from the rows of the requests' states."""

    class States:
        token_ids = torch.tensor([[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]], dtype=torch.int32)

        def row(self, request_id: str) -> int:
            return {"b": 0, "a": 1}[request_id]

    batch = PromptLogprobsBatch(
        rows=(PromptRows("a", 1, 2), PromptRows("b", 3, 1)), indices=(0, 1, 2), num_logprobs=2**31
    )
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    found = batch.gather(logits, cast(RequestStates, States()))
    assert found.token_ids[:, 0].tolist() == [1, 2, 1]
    assert found.token_ids.shape == (3, 6)
    expected = logits.log_softmax(-1).gather(1, found.token_ids.long())
    torch.testing.assert_close(found.logprobs, expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["in-step", "ahead"])
def test_preemption_changes_no_prompt_logprob(llama_dir: Path, llama: PreTrainedModel, is_async: bool) -> None:
    """A preempted prompt is computed anew, its log probabilities with it."""
    prompts = [[2 + (seed * 37 + i * 11) % 250 for i in range(20)] for seed in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, prompt_logprobs=2, logprobs=0)
    with LLM(
        llama_dir,
        dtype="float32",
        compiler="eager",
        max_model_len=64,
        block_size=4,
        num_kv_blocks=16,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        async_scheduling=is_async,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert llm.engine.stats.num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        reference = logprobs_after(llama, [*prompt, *tokens])
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for at in range(1, 20):
            found = output.prompt_logprobs[at]
            assert found is not None
            likeliest = reference[at - 1].topk(2).indices.tolist()
            assert list(found) == list(dict.fromkeys([prompt[at], *likeliest]))
            assert list(values_of(found).values()) == pytest.approx(reference[at - 1][list(found)].tolist(), abs=1e-4)
        own = [next(iter(values_of(found).values())) for found in output.outputs[0].logprobs or ()]
        assert own == pytest.approx([float(reference[19 + i, token]) for i, token in enumerate(tokens)], abs=1e-4)


@torch.no_grad()
def logprobs_after(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' log probabilities `[len(tokens), vocab_size]` of what follows each token."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.float().log_softmax(-1)
