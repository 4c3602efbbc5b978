"""Kinds of layers are recognised by their structure, and nothing else is taken for one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from piecegraph.runner.state_layers.modules.gated_delta_net import (
    KimiDeltaAttention,
    MergedGatedDeltaNet,
    SeparateGatedDeltaNet,
    UnmergedGatedDeltaNet,
)
from piecegraph.runner.state_layers.modules.mamba import NormedMamba
from piecegraph.runner.state_layers.modules.mamba2 import Mamba2, ScaledMamba2
from piecegraph.runner.state_layers.modules.replace import replace_state_layers
from piecegraph.runner.state_layers.modules.short_conv import GatedShortConv
from tests.runner.tiny_models import FAMILIES, HYBRIDS

KINDS: dict[str, type[nn.Module]] = {
    "qwen3.5": SeparateGatedDeltaNet,
    "qwen3-next": MergedGatedDeltaNet,
    "olmo-hybrid": UnmergedGatedDeltaNet,
    "kimi-linear": KimiDeltaAttention,
    "lfm2": GatedShortConv,
    "bamba": Mamba2,
    "nemotron-h": Mamba2,
    "falcon-h1": ScaledMamba2,
    "jamba": NormedMamba,
}


def meta_model(name: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config({**FAMILIES, **HYBRIDS}[name]())
    return model


@pytest.mark.parametrize("name", KINDS)
def test_layers_with_states_get_the_class_of_their_kind(name: str) -> None:
    """Only the class of these modules changes: parameters keep their names."""
    model = meta_model(name)
    names, classes = list(model.state_dict()), {key: type(each) for key, each in model.named_modules()}
    assert replace_state_layers(model) is None
    assert list(model.state_dict()) == names
    changed = {type(each) for key, each in model.named_modules() if type(each) is not classes[key]}
    assert changed == {KINDS[name]}


def test_a_model_without_states_stays_as_it_is() -> None:
    model = meta_model("llama")
    classes = [type(each) for each in model.modules()]
    assert replace_state_layers(model) is None
    assert [type(each) for each in model.modules()] == classes


@pytest.mark.parametrize("name", ["qwen3.5", "bamba", "jamba", "lfm2", "kimi-linear"])
def test_a_layer_with_another_part_is_refused(name: str) -> None:
    """None of the model's layers is changed then."""
    model = meta_model(name)
    layer = next(each for each in model.modules() if any(isinstance(child, nn.Conv1d) for child in each.children()))
    layer.another = nn.Linear(1, 1)
    problem = replace_state_layers(model)
    assert problem is not None and f"({type(layer).__name__}) keeps a state between tokens" in problem
    assert "another" in problem and type(layer).__module__.startswith("transformers.")
