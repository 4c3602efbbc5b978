"""Adapters over several ranks, stages and engines: tokens are those of the models that they are merged into."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from piecegraph import LLM, LoRARequest
from piecegraph.errors import CheckpointError, ConfigError
from piecegraph.runner.common.outputs import CompletionOutput
from piecegraph.runner.lora.modules import LoraOptions, adapt_modules, check_targets
from piecegraph.runner.pipeline_parallel.stage import Stage, StageCut
from tests.runner.data_parallel.engines_in_threads import llm_of_engines
from tests.runner.lora.test_adapter import change
from tests.runner.lora.test_llm_lora import OPTIONS, PROMPTS, Family
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.tiny_models import make_model

ROOM = {"enable_lora": True, "max_loras": 4, "max_cpu_loras": len(OPTIONS), "max_lora_rank": 8}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("adapters"))


def check_all(family: Family, llm: LLM) -> None:
    """Every kind of adapter and none in a batch, embeddings and the output layer included, in two orders."""
    numbers = [*range(len(OPTIONS)), None]
    prompts = [PROMPTS[0], *([[*PROMPTS[0], number] for number in range(len(OPTIONS))])]
    family.check(llm, numbers, prompts)
    family.check(llm, numbers[::-1], prompts)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 3}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "graph_kind": "recorded"}, marks=pytest.mark.slow),
    ],
    ids=["TP 2", "TP 3", "PP 2"],
)
def test_ranks_with_adapters_answer_as_the_merged_models_do(
    layout: Mapping[str, int], family: Family, tmp_path: Path
) -> None:
    """Three ranks pad heads. There are fewer slots than adapters, so that slots are written again on all ranks."""
    with llm_of_threads(family.base, num_kv_blocks=64, **layout, **ROOM) as llm:
        check_all(family, llm)
        check_another_base(family, llm, tmp_path)


def check_another_base(family: Family, llm: LLM, folder: Path) -> None:
    """An adapter with the output layer of another model is refused, whichever rank has that layer."""
    number = next(number for number, options in enumerate(OPTIONS) if "lm_head" in options.get("target_modules", ()))
    shutil.copytree(family.requests[number].lora_path, folder, dirs_exist_ok=True)
    change(folder, lambda tensors: tensors["base_model.model.lm_head.base_layer.weight"].add_(1))
    request = LoRARequest("another base", 92, str(folder))
    with pytest.raises(CheckpointError, match="the weight of lm_head in it is not the model's"):
        llm.generate({"prompt_token_ids": [5]}, lora_request=request, use_tqdm=False)


@pytest.mark.slow
def test_engines_with_adapters_answer_as_the_merged_models_do(family: Family, tmp_path: Path) -> None:
    """Each engine reads the adapters of its requests; a number that is given to another adapter is so everywhere."""
    with llm_of_engines(family.base, 2, num_kv_blocks=64, **ROOM) as llm:
        check_all(family, llm)
        engine = llm.llm_engine
        assert engine.list_loras() == set(range(1, len(OPTIONS) + 1))
        assert engine.pin_lora(3)
        first, second = family.requests[:2]
        assert engine.remove_lora(first.lora_int_id)
        family.requests[0] = type(first)("other", first.lora_int_id, second.lora_path)
        try:
            family.check(llm, [0, 0], PROMPTS[:2], alike=[1, 1])
        finally:
            family.requests[0] = first
        with pytest.raises(CheckpointError, match="no adapter_config.json"):
            llm.generate({"prompt_token_ids": [5]}, lora_request=type(first)("none", 90, str(tmp_path)), use_tqdm=False)
        check_a_folder_that_changes(family, llm, tmp_path / "changes")


def check_a_folder_that_changes(family: Family, llm: LLM, folder: Path) -> None:
    """An engine that has read other files than the front door refuses to run them; the other one goes on."""
    first, second = (Path(each.lora_path) for each in family.requests[:2])
    shutil.copytree(first, folder)
    request, prompt = LoRARequest("changes", 91, str(folder)), {"prompt_token_ids": [5, 6]}

    def answers() -> list[CompletionOutput]:
        """Give each engine a request."""
        return [each.outputs[0] for each in llm.generate([prompt] * 2, lora_request=request, use_tqdm=False)]

    llm.generate(prompt, lora_request=request, use_tqdm=False)  # on the first engine
    shutil.rmtree(folder)
    shutil.copytree(second, folder)
    has_read, has_not = answers()
    assert has_read.finish_reason != "error" and has_not.finish_reason == "error"
    assert re.search("files of the adapter 'changes' .* are not those that were checked", str(has_not.error))
    llm.engine.adapters.remove(91)
    assert all(each.finish_reason != "error" for each in answers())


def test_targets_are_looked_for_in_all_stages() -> None:
    """The first of two stages has no output layer, and the last one no embedding; each has layers of its own."""
    options = LoraOptions(num_slots=1, max_rank=4, target_modules=("embed_tokens", "q_proj", "lm_head"))
    stages = []
    for index in range(2):
        model = make_model("llama")
        StageCut(Stage(index=index, num_stages=2)).cut(model)
        stages.append(adapt_modules(model, options, dtype=torch.float32, device=torch.device("cpu"), is_stage=True))
    facts = [json.loads(json.dumps(each.facts())) for each in stages]
    for stage in stages:
        together = stage.with_stages(facts)
        assert together.modules == stage.modules and together.shapes.keys() == {
            "model.embed_tokens", "lm_head", *(f"model.layers.{number}.self_attn.q_proj" for number in range(2))
        }  # fmt: skip
        assert together.shapes["lm_head"].is_output and together.shapes["model.embed_tokens"].is_embedding
        check_targets("Model", options.target_modules, together.shapes, [])
        with pytest.raises(ConfigError, match="lora_target_modules has 'q_prj', and Model has no such linear layer"):
            check_targets("Model", ["q_prj"], together.shapes, ["layers.0.q_proj"])
