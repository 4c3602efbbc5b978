"""Hidden states leave a model as its second result, with no hook and no second run, and layers stay copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import CompileConfig
from piecegraph import compile as compile_module
from piecegraph.compiler.plans.plan_factors import plan_factors
from piecegraph.compiler.splitting.plan import CallStep
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.errors import ConfigError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from piecegraph.runner.traceable.hidden_states import LAST, has_leaving_hidden_states, let_hidden_states_leave
from tests.runner.tiny_models import llama_config, make_config, random_model, save

CPU = torch.device("cpu")
PLACES = (LAST, 0, 3, 8)
OPS = ("piecegraph::attention",)


def loaded(folder: Path, places: tuple[int, ...]) -> Any:
    source = ModelSource(model=str(folder), hidden_states=places)
    return load_model(source, load_config(source), dtype=torch.float32, device=CPU).model


@pytest.mark.slow
@torch.no_grad()
def test_they_leave_without_a_second_run_and_most_layers_are_copies(tmp_path: Path) -> None:
    """The key of its plan differs; that the values are right, `test_head_step` shows."""
    model = random_model(llama_config(num_hidden_layers=8))
    folder = save(model, tmp_path)
    plain, leaving = loaded(folder, ()), loaded(folder, PLACES)
    assert has_leaving_hidden_states(leaving) and not has_leaving_hidden_states(plain)
    assert list(plain.state_dict()) == list(leaving.state_dict())
    keys, notes, calls = [], [], []
    for each in (plain, leaving):
        module = CausalLMForward(each)
        inputs = example_inputs(CPU)
        call = ExampleCall.of(module, inputs, {}, DYNAMIC_DIMS)
        keys.append(plan_factors(module, call, CompileConfig())["model"])
        with compile_module(
            module, CompileConfig(compiler="eager", split_ops=OPS), dynamic_dims=DYNAMIC_DIMS, example_inputs=inputs
        ) as compiled:
            notes.append(compiled.report().trace_note)
            calls.append([step.args[-1] for step in compiled.plan.steps if isinstance(step, CallStep)])
            results = compiled.plan.results
            assert not any("leaves_model" in str(step) for step in compiled.plan.steps)
    assert keys[0] != keys[1]
    assert calls[0] == calls[1] and len(calls[0]) == 8, "no layer runs twice"
    assert len(results) == 2
    assert notes == [
        "6 of 8 layers are copies of one that was traced",
        "3 of 5 layers are copies of one that was traced",
    ]


def test_a_place_that_is_not_there_is_refused() -> None:
    model = random_model(make_config("LlamaConfig"))
    with pytest.raises(
        ConfigError, match="hidden states of layer 3 are asked for, and LlamaForCausalLM has layers 0 to 1"
    ):
        let_hidden_states_leave(model, (3,))
    assert replace(ModelSource(model="a"), hidden_states=(1,)).hidden_states == (1,)
