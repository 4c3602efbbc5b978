"""Stages of a pipeline, and engines of two stages each, behind the thread of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.runner.prompts.tokenize import TokenizedPrompt
from piecegraph.tools.serve.engine.engine_thread import EngineThread
from piecegraph.tools.serve.engine.generation_steps import GenerationRequest, GenerationSteps
from tests.runner.data_parallel.engines_in_threads import llm_of_engines
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.tiny_models import make_model, save

PROMPTS = [[5, 17, 3], [9], list(range(20, 44)), [7, 7], [64, 2]]
TIMEOUT_S = 120.0


def request(prompt: list[int], max_tokens: int) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(prompt=TokenizedPrompt(text=None, token_ids=prompt), params=params)


async def serve(llm: LLM, model: PreTrainedModel) -> None:
    """Stream several answers at once, end one of them early, and then answer again."""
    thread = EngineThread(GenerationSteps(llm.engine), device=llm.device)
    thread.start()

    async def answer(name: str, prompt: list[int]) -> None:
        stream = thread.submit(name, request(prompt, 10))
        output = await asyncio.wait_for(stream.get(), TIMEOUT_S)
        while not output.finished:
            output = await asyncio.wait_for(stream.get(), TIMEOUT_S)
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)

    async def leave(name: str) -> None:
        stream = thread.submit(name, request([3, 4], 60))
        await asyncio.wait_for(stream.get(), TIMEOUT_S)
        thread.abort(stream)

    try:
        for turn in range(2):
            answers = [answer(f"{turn} {number}", prompt) for number, prompt in enumerate(PROMPTS)]
            await asyncio.gather(*answers, leave(f"{turn} left"))
    finally:
        assert thread.stop(TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    "load",
    [
        lambda folder: llm_of_threads(folder, pipeline_parallel_size=2, graph_kind="recorded"),
        lambda folder: llm_of_engines(folder, 2, pipeline_parallel_size=2),
    ],
    ids=["PP 2", "PP 2 x DP 2"],
)
def test_stages_are_served(load: Callable[[Path], AbstractContextManager[LLM]], tmp_path: Path) -> None:
    model = make_model("llama")
    with load(save(model, tmp_path)) as llm:
        asyncio.run(serve(llm, model))
        stats = llm.engine.stats
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_pipeline_steps
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert llm.engine.stats.num_bubbles > stats.num_bubbles  # one request alone does not fill two stages
        assert any(metric.name == "piecegraph:pipeline_bubbles" for metric in llm.get_metrics())
