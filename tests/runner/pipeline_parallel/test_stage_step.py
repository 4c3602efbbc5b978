"""Stages of a pipeline answer as one process does, over random schedules: arrivals, aborts, preemption, prefixes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.progress import Phase
from piecegraph.runner.distributed.group_runner import GroupRunner
from piecegraph.runner.output.async_output import AsyncOutput
from piecegraph.runner.pipeline_parallel.stage_step import count_computed
from piecegraph.runner.startup.compiling.profile import run_largest_step
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.tiny_models import llama_config, make_model, random_model, save

PROMPTS = [[5, 17, 3], [9], list(range(20, 44))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PREFIX = [7, 8, 9, 10] * 6


def random_request(random: Random) -> tuple[list[int], SamplingParams]:
    tail = [random.randrange(3, 120) for _ in range(random.randrange(1, 6))]
    prompt = [*PREFIX[: random.choice((0, 0, 8, 16, 24))], *tail]
    options: dict[str, Any] = {}
    if random.random() < 0.5:
        options = {"temperature": 1.1, "seed": random.randrange(99), "top_k": 20, "repetition_penalty": 1.2}
        options["logprobs"] = random.choice((None, 1))
        options["prompt_logprobs"] = random.choice((None, None, 0))
    return prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": random.randrange(1, 12), **options})


def run_at_random(llm: LLM, seed: int, num_requests: int = 14) -> dict[str, list[int]]:
    """Add and abort requests between steps; return the tokens of those that end by themselves."""
    random, engine = Random(seed), llm.engine
    arrivals = [(f"r{number}", *random_request(random)) for number in range(num_requests)]
    finished: dict[str, list[int]] = {}
    aborts = 3
    while arrivals or engine.has_unfinished:
        if arrivals and (random.random() < 0.4 or not engine.has_unfinished):
            name, prompt, params = arrivals.pop(0)
            engine.add_request(name, prompt, params)
        if aborts and random.random() < 0.04 and engine.requests:
            aborts -= 1
            engine.abort(random.choice(list(engine.requests)))
        for output in engine.step() if engine.has_unfinished else ():
            if output.finished and output.outputs[0].finish_reason != "abort":
                finished[output.request_id] = list(output.outputs[0].token_ids)
    return finished


@pytest.mark.slow
def test_stages_answer_as_transformers_does_and_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages over graphs that are recorded; blocks are so few that requests are preempted.

    The last stage's tokens are sent, and rank 0 waits for them, as where GPUs compute them.
    """
    monkeypatch.setattr(AsyncOutput, "is_there", False)
    model = random_model(llama_config(num_hidden_layers=4, tie_word_embeddings=True))
    folder = save(model, tmp_path)
    options = {"num_kv_blocks": 12, "block_size": 4, "max_model_len": 44, "max_num_batched_tokens": 16}
    answers = []
    num_preemptions = 0
    for num_stages in (1, 3):
        with llm_of_threads(folder, pipeline_parallel_size=num_stages, graph_kind="recorded", **options) as llm:
            if num_stages > 1:
                assert isinstance(llm.runner, GroupRunner)
                llm.runner.group.is_on_gpu = True
            answers.append([run_at_random(llm, seed) for seed in range(3)])
            num_preemptions = llm.engine.stats.num_preemptions
            reports = llm.collective_rpc("report")
            with torch.no_grad():  # of the first stage, which samples nothing
                run_largest_step(llm.runner.step, num_tokens=16, max_model_len=44, needs_host_batch=True)
    first, middle, last = ({*report["unique_pieces"]} for report in reports)
    assert first & middle and not last & (first | middle), "the piece of a layer is shared by stages that have one"
    assert num_preemptions, "no request was preempted: the test shows less than it says"
    assert [report["layers"] for report in reports] == [(0, 1), (1, 3), (3, 4)]
    for seed, (one, three) in enumerate(zip(*answers, strict=True)):
        both = one.keys() & three.keys()  # an abort may come after the end
        assert len(both) > 7
        requests = Random(seed)
        for name, (prompt, params) in {f"r{n}": random_request(requests) for n in range(14)}.items():
            if name not in both:
                continue
            if params.temperature == 0.0:
                assert_same_tokens(model, prompt, three[name])
            else:
                assert one[name] == three[name], (seed, name)


def test_counts_of_padding_change_nothing() -> None:
    num_computed = torch.tensor([5, 0, 7], dtype=torch.int32)
    count_computed(num_computed, torch.tensor([2, 1, -1, -1]), torch.tensor([9, 3, 100, 100], dtype=torch.int32))
    assert num_computed.tolist() == [5, 3, 9]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_ranks_with_whole_experts_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Each of two ranks reads and holds two of four experts of each layer, and the start says what each has read."""
    model = make_model(name)
    folder = save(model, tmp_path)
    layout, phases = {"tensor_parallel_size": 2, "enable_expert_parallel": True}, list[Phase]()
    with llm_of_threads(folder, **layout, graph_kind="recorded", on_phase=phases.append) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
        reports = llm.collective_rpc("report")
    assert [report["experts"] for report in reports] == [2, 2]
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert all(report["weight_bytes"] == report["bytes_read"] < 0.55 * whole for report in reports)
    read = [f"rank {number} {report['bytes_read'] / 2**20:.1f} MiB" for number, report in enumerate(reports)]
    assert [phase.detail for phase in phases if "weights read" in phase.detail] == [f"weights read: {', '.join(read)}"]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral", "qwen3-moe"])
def test_stages_of_ranks_of_a_family(name: str, tmp_path: Path) -> None:
    """Two stages of two ranks each; sliding windows, tied embeddings, experts."""
    model = make_model(name)
    folder = save(model, tmp_path)
    with llm_of_threads(folder, pipeline_parallel_size=2, tensor_parallel_size=2, max_num_batched_tokens=16) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)
