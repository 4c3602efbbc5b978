"""Weights of the model in an adapter's files are compared with those of the ranks that hold the module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.lora.base_weights import BaseRows, base_rows, check_base
from piecegraph.runner.lora.modules import AdaptedModules, LoraOptions, adapt_modules
from piecegraph.runner.pipeline_parallel.stage import Stage, StageCut
from piecegraph.runner.quantization.methods.shard import Shard
from tests.runner.tiny_models import make_model

PATH = "lm_head"


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    tensor: torch.Tensor = make_model("llama").lm_head.weight.detach()
    return tensor


@pytest.fixture(scope="module")
def stages() -> list[AdaptedModules]:
    """The modules of two stages, of which the second one has the output layer."""
    options, found = LoraOptions(num_slots=1, max_rank=4), []
    for index in range(2):
        model = make_model("llama")
        StageCut(Stage(index=index, num_stages=2)).cut(model)
        found.append(adapt_modules(model, options, dtype=torch.float32, device=torch.device("cpu"), is_stage=True))
    facts = [json.loads(json.dumps(each.facts())) for each in found]
    return [each.with_stages(facts) for each in found]


def test_the_stage_that_has_the_module_is_asked(stages: list[AdaptedModules], weight: torch.Tensor) -> None:
    """The first stage alone can compare the shape only."""
    first, shape = stages[0], stages[0].shapes[PATH]

    def all_stages(path: str) -> list[BaseRows]:
        return [each for stage in stages for each in base_rows(stage, path)]

    assert base_rows(first, PATH) == [] and len(all_stages(PATH)) == 1
    check_base(Path("a"), PATH, weight, shape, all_stages)
    check_base(Path("a"), PATH, weight + 1, shape, lambda path: base_rows(first, path))
    with pytest.raises(CheckpointError, match="the weight of lm_head in it is not the model's"):
        check_base(Path("a"), PATH, weight + 1, shape, all_stages)
    with pytest.raises(CheckpointError, match=r"\(127, 32\), the model's \(128, 32\)"):
        check_base(Path("a"), PATH, weight[1:], shape, all_stages)


@pytest.mark.parametrize("dim", [-2, -1])
def test_each_rank_compares_its_part(dim: int, stages: list[AdaptedModules], weight: torch.Tensor) -> None:
    """A weight that differs where the second of two ranks has it alone is found."""
    size, shape = weight.shape[dim] // 2, stages[1].shapes[PATH]
    shards = [Shard(dim=dim, full_size=2 * size, parts=((at, at + size, size),)) for at in (0, size)]
    index = torch.arange(0, shards[0].local_shape(weight.shape)[0], 4)
    bases = [BaseRows(shard=shard, index=index, rows=shard.of(weight)[index], is_quantised=False) for shard in shards]
    other = weight.clone()
    other.narrow(dim, size, size).add_(1)
    check_base(Path("a"), PATH, weight, shape, lambda path: bases)
    check_base(Path("a"), PATH, other, shape, lambda path: bases[:1])
    with pytest.raises(CheckpointError, match="not the model's"):
        check_base(Path("a"), PATH, other, shape, lambda path: bases)
