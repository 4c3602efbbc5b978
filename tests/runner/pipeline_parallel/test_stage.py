from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.runner.pipeline_parallel.stage import Stage, StageCut, layers_of_stage, stage_plan
from tests.runner.tiny_models import llama_config, make_model, random_model


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(6, [2, 2, 2]), (7, [2, 3, 2]), (8, [3, 3, 2]), (3, [1, 1, 1])],
)
def test_a_rest_of_layers_goes_to_stages_before_the_last(num_layers: int, expected: list[int]) -> None:
    held = [layers_of_stage(num_layers, Stage(index=index, num_stages=3)) for index in range(3)]
    assert [len(layers) for layers in held] == expected
    assert [number for layers in held for number in layers] == list(range(num_layers))


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_together_hold_the_model(is_tied: bool) -> None:
    """Each parameter is on one stage, but for an embedding that the output layer shares: the last stage has it too."""
    model: Any = random_model(llama_config(num_hidden_layers=4, tie_word_embeddings=is_tied))
    names = {name for name, _ in model.named_parameters()}
    found: list[str] = []
    for index in range(3):
        part: Any = random_model(llama_config(num_hidden_layers=4, tie_word_embeddings=is_tied))
        cut = StageCut(Stage(index=index, num_stages=3))
        cut.cut(part)
        cut.cut(part)  # which changes nothing
        found += [name for name, _ in part.named_parameters()]
    assert set(found) == names
    assert [name for name in names if found.count(name) > 1] == (["model.embed_tokens.weight"] if is_tied else [])


def test_no_stage_leaves_a_model_whole() -> None:
    model = make_model("llama")
    cut = StageCut(None)
    cut.cut(model)
    assert cut.plan is None
    assert len(list(model.parameters())) == len(list(make_model("llama").parameters()))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=3, and the model has 2 layers"):
        stage_plan(make_model("llama"), Stage(index=0, num_stages=3))


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="OPTForCausalLM has no plan for pipeline parallelism"):
        stage_plan(make_model("opt"), Stage(index=0, num_stages=2))


def test_parameters_outside_of_the_plan_are_refused_by_name() -> None:
    model: Any = make_model("llama")
    model.model.more = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModel, match=r"outside of its plan for pipeline parallelism \(model\.more\)"):
        stage_plan(model, Stage(index=0, num_stages=2))
