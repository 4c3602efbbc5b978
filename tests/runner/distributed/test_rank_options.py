"""What one process does for a request or with its weights, several ranks do too: processors, embeddings, reloads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import CheckpointError, ConfigError, UsageError
from piecegraph.runner.common.logits_processor import AdapterLogitsProcessor
from piecegraph.runner.startup import reload_weights
from tests.runner.data_parallel.engines_in_threads import llm_of_engines
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.tiny_models import make_model, random_model, save

PROMPTS = [[5, 17, 3], [9], list(range(20, 44))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class CountUp(AdapterLogitsProcessor):
    """Allows the token of `extra_args["from"]`, after it the next one, and so on; fails at the token 60."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        first = (params.extra_args or {}).get("from")
        if first is None:
            return None

        def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = first + len(output)
            if token == 60:
                raise ValueError("sixty")
            return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(token), 0.0)

        return process


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_answers_of(model: PreTrainedModel, llm: LLM) -> None:
    for prompt, found in zip(PROMPTS, answers(llm), strict=True):
        assert_same_tokens(model, prompt, found)


def check_processors(llm: LLM, model: PreTrainedModel) -> None:
    """A processor decides some requests of a batch, and its error ends the request alone."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, extra_args={"from": 30}),
        GREEDY,
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, extra_args={"from": 57}),
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == list(range(30, 36))
    assert_same_tokens(model, PROMPTS[1], outputs[1].outputs[0].token_ids)
    failed = outputs[2].outputs[0]
    assert (failed.token_ids, failed.finish_reason, failed.error) == ([57, 58, 59], "error", "ValueError: sixty")


def check_embeddings(llm: LLM, model: PreTrainedModel) -> None:
    """A prompt that is given as the embeddings of its tokens has the answer of the tokens, beside one of tokens."""
    embedding: Any = model.get_input_embeddings()
    given: list[Any] = [
        {"prompt_embeds": embedding(torch.tensor(PROMPTS[2])).detach()},
        {"prompt_token_ids": PROMPTS[0]},
    ]
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    for prompt, output in zip((PROMPTS[2], PROMPTS[0]), outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.mark.slow
def test_two_ranks_run_processors_and_embeddings(tmp_path: Path) -> None:
    model = make_model("llama")
    options = {"logits_processors": [CountUp], "enable_prompt_embeds": True}
    with llm_of_threads(save(model, tmp_path), tensor_parallel_size=2, **options) as llm:
        check_processors(llm, model)
        check_embeddings(llm, model)
        assert_answers_of(model, llm)


@pytest.mark.slow
def test_two_engines_run_processors_and_embeddings(tmp_path: Path) -> None:
    model = make_model("llama")
    options = {"logits_processors": [CountUp], "enable_prompt_embeds": True}
    with llm_of_engines(save(model, tmp_path), 2, **options) as llm:
        check_processors(llm, model)
        check_embeddings(llm, model)


def fail_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks but the first to be asked read their part."""
    read, lock, asked = reload_weights.read_rank_weights, threading.Lock(), list[int]()

    def fail_once(*args: Any) -> Any:
        with lock:
            asked.append(1)
            is_first = len(asked) == 1
        return (CheckpointError("planted"), "") if is_first else read(*args)

    monkeypatch.setattr(reload_weights, "read_rank_weights", fail_once)


def read_another_on_one_rank(monkeypatch: pytest.MonkeyPatch, other: Path) -> None:
    """Have one rank read the files of another folder, as on a machine that has others under the same path."""
    read, lock, asked = reload_weights.read_rank_weights, threading.Lock(), list[int]()

    def read_another(loaded: Any, weights: Any) -> Any:
        with lock:
            asked.append(1)
            is_second = len(asked) == 2
        return read(loaded, other if is_second else weights)

    monkeypatch.setattr(reload_weights, "read_rank_weights", read_another)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
    ids=["EP 2", "PP 2", "DP 2"],
)
def test_weights_are_reloaded_on_all_ranks_or_on_none(
    layout: Mapping[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads its part of the new files; a file that one rank cannot read changes no rank."""
    models = [random_model(make_model("mixtral").config, seed) for seed in (0, 1)]
    first, second = (save(model, tmp_path / str(number)) for number, model in enumerate(models))
    damaged = save(models[1], tmp_path / "damaged")
    (file,) = damaged.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    other = save(make_model("llama"), tmp_path / "other")
    ranks = {name: value for name, value in layout.items() if name != "data_parallel_size"}
    engines = layout.get("data_parallel_size")
    made = llm_of_threads(first, **ranks) if engines is None else llm_of_engines(first, engines, **ranks)
    with made as llm:
        assert_answers_of(models[0], llm)
        assert llm.reload_weights(second) == len(models[1].state_dict())
        assert_answers_of(models[1], llm)
        for folder, error in ((damaged, Exception), (other, ConfigError)):
            with pytest.raises(error):
                llm.reload_weights(folder)
            assert_answers_of(models[1], llm)
        with monkeypatch.context() as patch:
            fail_on_one_rank(patch)
            with pytest.raises(CheckpointError, match="planted"):
                llm.reload_weights(first)
        with monkeypatch.context() as patch:
            read_another_on_one_rank(patch, second)
            with pytest.raises(CheckpointError, match="has read other weight files than rank 0 .* no rank has written"):
                llm.reload_weights(first)
        assert_answers_of(models[1], llm)
        with pytest.raises(UsageError, match="weights are read from files, of which each rank reads its part"):
            llm.reload_weights(models[0].state_dict())
        llm.reload_weights()
        assert_answers_of(models[0], llm)


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_processors_that_other_processes_cannot_import_are_refused(layout: dict[str, int], tmp_path: Path) -> None:
    class Local(CountUp):
        """A class that no other process knows."""

    with pytest.raises(ConfigError, match=r"has test_proc.*Local, which other processes cannot import; put the class"):
        LLM(tmp_path, logits_processors=[Local], **layout)  # type: ignore[arg-type]
