"""Adapters over several ranks: tokens are those of the models that they are merged into."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.lora.test_llm_lora import OPTIONS, PROMPTS, Family
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_with_adapters_answer_as_the_merged_models_do(num_ranks: int, tmp_path: Path) -> None:
    """Every kind of adapter and none in a batch, embeddings and the output layer included; three ranks pad heads.

    There are fewer slots than adapters, so that slots are written again on all ranks.
    """
    family = Family(tmp_path)
    options = {"enable_lora": True, "max_loras": 4, "max_cpu_loras": len(OPTIONS), "max_lora_rank": 8}
    with llm_of_threads(family.base, tensor_parallel_size=num_ranks, num_kv_blocks=64, **options) as llm:
        numbers = [*range(len(OPTIONS)), None]
        prompts = [PROMPTS[0], *([[*PROMPTS[0], number] for number in range(len(OPTIONS))])]
        family.check(llm, numbers, prompts)
        family.check(llm, numbers[::-1], prompts)
