from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.pipeline_parallel.stage import Stage, StageCut
from piecegraph.runner.pipeline_parallel.stage_forward import (
    check_passes_through,
    stage_dims,
    stage_forward,
    stage_inputs,
)
from tests.runner.tiny_models import FAMILIES, UNLISTED, make_config, make_model, random_model

NO_PLAN = {"opt", "gpt2", "gpt-neox"}
PLANNED = sorted({*FAMILIES, *UNLISTED} - NO_PLAN)


def stages_of(model: Any, num_stages: int) -> list[tuple[Any, Any]]:
    found = []
    for index in range(num_stages):
        part = copy.deepcopy(model).requires_grad_(False)
        cut = StageCut(Stage(index=index, num_stages=num_stages))
        cut.cut(part)
        found.append((part, cut.plan))
    return found


@pytest.mark.parametrize("name", PLANNED)
def test_stages_compute_the_model(name: str) -> None:
    """One after the other, each with its own layers, to the same bits; and their check passes."""
    model = make_model(name)
    tokens = torch.randint(1, 128, (9,), generator=torch.Generator().manual_seed(1))
    positions, indices = torch.arange(9), torch.tensor([3, 8])
    with torch.no_grad():
        expected = model(tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=indices).logits[0]
        hidden = tokens
        for part, plan in stages_of(model, 2):
            check_passes_through(part, plan)
            rows = (indices,) if plan.stage.is_last else ()
            hidden = stage_forward(part, 0, plan)(hidden, positions, *rows)
    assert torch.equal(hidden, expected)


def test_a_model_that_changes_hidden_states_elsewhere_is_refused() -> None:
    """Granite scales its embeddings in the base model, which each stage would do again."""
    (_, _), (part, plan) = stages_of(random_model(make_config("GraniteConfig", embedding_multiplier=12.0)), 2)
    with pytest.raises(UnsupportedModel, match="changes hidden states outside of the modules"):
        check_passes_through(part, plan)
    assert any(parameter.dim() == 2 for parameter in part.model.layers.parameters())  # the check has put them back


def test_inputs_of_stages() -> None:
    (_, first), (_, last) = stages_of(make_model("llama"), 2)
    example = torch.zeros(8, dtype=torch.int64), torch.arange(8), torch.tensor([1])
    assert [each.shape for each in stage_inputs(first, torch.float32, example)] == [(8,), (8,)]
    assert [each.shape for each in stage_inputs(last, torch.bfloat16, example)] == [(8, 32), (8,), (1,)]
    assert list(stage_dims(first.stage)) == ["input_ids", "positions"]
    assert list(stage_dims(last.stage)) == ["hidden_states", "positions", "logits_indices"]
