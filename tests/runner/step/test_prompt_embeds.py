"""A prompt of embeddings is answered as the prompt whose embeddings they are; others beside it notice nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, EmbedsPrompt, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError, RequestError
from piecegraph.runner.engine.model_runner import PROMPT_EMBEDS_RUN_UNCAPTURED
from piecegraph.runner.scheduling.scheduler_output import AddedRequest, ScheduledRequest
from piecegraph.runner.step.prompt_embeds import EmbedsBatch, PromptEmbedsStates, embedding_size
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.test_graphs import load

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(60, 100)), [9]]


@pytest.fixture(scope="module")
def embeds_llm(llama_dir: Path) -> Iterator[LLM]:
    """Small steps, so that prompts are computed in chunks, beside one another."""
    with LLM(
        llama_dir,
        dtype="float32",
        compiler="eager",
        enable_prompt_embeds=True,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_kv_blocks=32,
    ) as llm:
        yield llm


def embeds_of(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    embeds: torch.Tensor = model.get_input_embeddings()(torch.tensor(prompt)).detach()
    return embeds


def test_token_embeddings_are_answered_like_the_tokens(embeds_llm: LLM, llama: PreTrainedModel) -> None:
    """Mixed with prompts of ids in the same steps, in chunks; the ids of the output mean nothing."""
    mixed: list[Any] = []
    for prompt in PROMPTS:
        mixed += [EmbedsPrompt(prompt_embeds=embeds_of(llama, prompt)), prompt]
    outputs = embeds_llm.generate(mixed, GREEDY)
    for prompt, by_embeds, by_ids in zip(PROMPTS, outputs[::2], outputs[1::2], strict=True):
        assert_same_tokens(llama, prompt, by_embeds.outputs[0].token_ids)
        assert by_embeds.outputs[0].token_ids == by_ids.outputs[0].token_ids
        assert by_embeds.prompt_token_ids == [0] * len(prompt)


def test_only_equal_embeddings_share_a_prefix(embeds_llm: LLM, llama: PreTrainedModel) -> None:
    """Their ids are all alike; what they are made of is not."""
    embeds = embeds_of(llama, list(range(100, 140)))
    engine = embeds_llm.engine
    (first,) = embeds_llm.generate({"prompt_embeds": embeds}, GREEDY)
    hits = engine.stats.num_prefix_hits
    embeds_llm.generate({"prompt_embeds": embeds + 0.5}, GREEDY)
    embeds_llm.generate([0] * 40, GREEDY)
    assert engine.stats.num_prefix_hits == hits
    (again,) = embeds_llm.generate({"prompt_embeds": embeds}, GREEDY)
    assert engine.stats.num_prefix_hits == hits + 32
    assert again.outputs == first.outputs


def test_several_completions_run_beside_other_requests(embeds_llm: LLM, llama: PreTrainedModel) -> None:
    """Seeded draws are those of the ids, and log probabilities of a prompt beside are its own."""
    params = [
        SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=1),
    ]
    by_embeds = embeds_llm.generate([{"prompt_embeds": embeds_of(llama, PROMPTS[1])}, PROMPTS[0]], params)
    by_ids = embeds_llm.generate([PROMPTS[1], PROMPTS[0]], params)
    for one, other in zip(by_embeds, by_ids, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
    assert by_embeds[1].prompt_logprobs is not None and len(by_embeds[1].prompt_logprobs) == 3


def test_a_strict_engine_runs_prompt_embeds_uncaptured_and_says_so(llama_dir: Path, llama: PreTrainedModel) -> None:
    """Nothing else is downgraded: steps without embeddings run under graphs."""
    with load(llama_dir, enable_prompt_embeds=True, strict=True) as llm:
        mixed: list[Any] = [{"prompt_embeds": embeds_of(llama, PROMPTS[1])}, PROMPTS[0]]
        outputs = llm.generate(mixed, GREEDY)
        reasons = {row.mode: row.reason for row in llm.runner.counters.rows() if row.reason is not None}
        modes = llm.runner.counters.by_mode()
    for prompt, output in zip([PROMPTS[1], PROMPTS[0]], outputs, strict=True):
        assert_same_tokens(llama, prompt, output.outputs[0].token_ids)
    assert reasons == {CUDAGraphMode.NONE: PROMPT_EMBEDS_RUN_UNCAPTURED}
    assert modes[CUDAGraphMode.FULL] > 0 and modes[CUDAGraphMode.NONE] == 3  # 40 rows, at most 16 a step


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (torch.zeros(3, 5), GREEDY, "prompt_embeds has rows of 5 numbers; the model's embeddings have "),
        (torch.full((1, 32), torch.nan), GREEDY, "infinite or NaN"),
        (torch.zeros(1, 32), SamplingParams(prompt_logprobs=1), "prompt_logprobs belong to a prompt's tokens"),
        (torch.zeros(1, 32), SamplingParams(repetition_penalty=1.1), "repetition_penalty counts the tokens"),
        (torch.zeros(0, 32), GREEDY, "the prompt is empty"),
        (torch.zeros(96, 32), GREEDY, "the prompt has 96 tokens"),
    ],
)
def test_invalid_prompt_embeds_are_refused(embeds_llm: LLM, prompt: Any, params: SamplingParams, message: str) -> None:
    if prompt.shape[1] == 32:
        prompt = prompt.new_zeros(len(prompt), embeds_llm.hf_config.hidden_size) + prompt[:1, :1].sum()
    with pytest.raises(RequestError, match=message):
        embeds_llm.generate({"prompt_embeds": prompt}, params)


def test_prompt_embeds_must_be_enabled(llm: LLM) -> None:
    with pytest.raises(RequestError, match="make the LLM with enable_prompt_embeds=True"):
        llm.generate({"prompt_embeds": torch.zeros(2, llm.hf_config.hidden_size)}, GREEDY)


def test_a_model_without_embeddings_is_refused() -> None:
    class Model(torch.nn.Module):
        def get_input_embeddings(self) -> torch.nn.Module:
            return torch.nn.Embedding(2, 2)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(ConfigError, match="enable_prompt_embeds=True, but Model takes no embeddings"):
        embedding_size(Model())  # type: ignore[arg-type]


def test_rows_of_a_step() -> None:
    """Each row of a prompt is returned once, and again when the request runs again."""
    states = PromptEmbedsStates()
    embeds = torch.arange(6.0).view(3, 2)
    added = AddedRequest(
        request_id="a",
        token_ids=[0, 0, 0],
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=((0,),),
        sampling_params=GREEDY,
        seed=0,
        prompt_embeds=embeds,
    )
    states.add(added)

    def step(computed: int, count: int) -> EmbedsBatch | None:
        return states.batch([ScheduledRequest("b", 2, 0, True, 1), ScheduledRequest("a", count, computed, True, 1)])

    batch = step(0, 2)
    assert batch is not None and batch.rows == (2, 3)
    batch = step(2, 1)
    assert batch is not None and batch.rows == (2,) and torch.equal(batch.chunks[0], embeds[2:])
    assert step(3, 1) is None
    states.add(added)
    assert step(4, 1) is None  # all of the prompt was found in the cache, and more
    filled = torch.zeros(4, 2, dtype=torch.float64)
    EmbedsBatch(rows=(1, 3), chunks=(embeds[:1], embeds[2:])).put_into(filled)
    assert filled.tolist() == [[0, 0], [0, 1], [0, 0], [4, 5]]


@pytest.mark.gpu
def test_on_a_gpu_between_graphs(llama: PreTrainedModel, llama_dir: Path) -> None:
    """Compiled and captured, a step ahead: embeddings are answered as their tokens, and so are prompts beside them."""
    with LLM(llama_dir, dtype="float32", device="cuda", enable_prompt_embeds=True, max_num_seqs=4) as llm:
        mixed: list[Any] = [*PROMPTS, *({"prompt_embeds": embeds_of(llama, prompt)} for prompt in PROMPTS)]
        outputs = llm.generate(mixed, GREEDY)
    for prompt, output in zip([*PROMPTS, *PROMPTS], outputs, strict=True):
        assert_same_tokens(llama, prompt, output.outputs[0].token_ids)
