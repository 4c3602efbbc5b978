"""Engines that share experts run each step together, and give the tokens of one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.errors import ConfigError, UnsupportedModel, WorkerError
from piecegraph.runner.distributed.worker import Worker
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.plan import rank_plan
from tests.runner.data_parallel.test_engine_processes import assert_gone, engines
from tests.runner.distributed.test_executor import pid_of
from tests.runner.tiny_models import make_model, save

NUM_PROMPTS = 7
PROMPTS = [{"prompt_token_ids": [number + 1, 5, 17, 3] * (1 + number % 3)} for number in range(NUM_PROMPTS)]
PARAMS = [
    SamplingParams(
        temperature=float(number % 2),
        seed=number,
        max_tokens=6 + 3 * number,  # so that engines run out of requests at different times
        prompt_logprobs=1 if number == 5 else None,  # which runs eagerly, beside graphs
    )
    for number in range(NUM_PROMPTS)
]


def tokens(llm: LLM, count: int = NUM_PROMPTS) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[:count], PARAMS[:count], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def modes(worker: Worker) -> set[str]:
    """Return the modes that steps of this rank ran under."""
    return {mode.value for mode in worker.loaded.runner.counters.by_mode()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), [("qwen3-moe", 1), ("mixtral", 2)])
def test_engines_that_share_experts_answer_as_one(name: str, tensor: int, tmp_path: Path) -> None:
    """Each rank holds and reads its experts only; an engine without requests takes part in the other's steps."""
    folder = save(make_model(name), tmp_path)
    with engines(folder, 1) as llm:
        expected = tokens(llm)
    options = {"tensor_parallel_size": tensor, "enable_expert_parallel": True, "graph_kind": "recorded"}
    with engines(folder, 2, **options) as llm:
        assert tokens(llm) == expected
        assert tokens(llm, 1) == expected[:1]  # the other engine has no request
        reports = llm.collective_rpc("report")
        assert [report["experts"] for report in reports] == [4 // (2 * tensor)] * (2 * tensor)
        assert all(report["bytes_read"] == report["weight_bytes"] for report in reports)
        ran = llm.collective_rpc(modes)
        assert all("PIECEWISE" in found for found in ran), ran  # although a step of engine 1 is eager
        assert all("NONE" in found for found in ran[tensor:]), ran
        ranks = llm.collective_rpc(pid_of)
        os.kill(ranks[-1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="engine 1"):
            tokens(llm)
        assert_gone(ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2}, "enable_expert_parallel with pipeline_parallel_size=2 is not yet available"),
        ({"strict": True}, "enable_expert_parallel with strict=True is not yet available"),
        ({"compile_sizes": [1]}, "compile_sizes is not yet available with data_parallel_size=2 and enable_expert"),
    ],
)
def test_what_engines_that_share_experts_cannot_do_is_refused(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path, data_parallel_size=2, enable_expert_parallel=True, **arguments)  # type: ignore[arg-type]


def test_a_model_without_experts_is_refused() -> None:
    experts = ExpertRanks(engine=1, num_engines=2)
    with pytest.raises(UnsupportedModel, match="no plan for expert parallelism"):
        rank_plan(make_model("llama"), 0, 1, experts=experts)
    plan = rank_plan(make_model("mixtral"), 0, 1, experts=experts)
    assert (plan.num_experts, plan.expert_rank) == (2, 1)
    assert set(plan.styles.values()) == {"ep_experts"}  # all else is whole in each engine
