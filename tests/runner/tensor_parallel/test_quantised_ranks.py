"""Ranks with quantised weights answer as one process with them does: `tensor_parallel/sharded_checkpoint.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.quantization import online
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.quantization.checkpoints.written import FORMATS, write_checkpoint
from tests.runner.quantization.expert_models import mixture, write_mixture, write_mxfp4
from tests.runner.quantization.test_llm_quantised import PROMPTS
from tests.runner.tiny_models import make_config, random_model, save

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
TWO, THREE, EXPERTS, STAGES = (
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 3},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
)


def tokens_of(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_ranks_answer_as_one(folder: Path, *layouts: dict[str, Any], **options: Any) -> None:
    with llm_of_threads(folder, **options) as llm:
        expected = tokens_of(llm)
        (whole,) = llm.collective_rpc("report")
    for layout in layouts:
        with llm_of_threads(folder, **layout, **options) as llm:
            assert tokens_of(llm) == expected, layout
            reports = llm.collective_rpc("report")
        assert all(report["bytes_read"] for report in reports)
        shares = [report["weight_bytes"] / whole["weight_bytes"] for report in reports]
        assert max(shares) < {2: 0.6, 3: 0.6, 4: 0.4}[len(shares)], shares


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int4", "fp8"))])
def test_weights_that_are_quantised_while_they_load(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied to the embedding, which is quantised with them; two stages of two ranks, and three ranks with padding.

    With int4, the kernel that rounds float32 to bfloat16 is left out: it fits the whole weight and not each part.
    """
    linears, embeddings = online.SCHEMES["int4"]
    exact = {**online.SCHEMES, "int4": (replace(linears, may_round=False), embeddings)}
    monkeypatch.setattr(online, "SCHEMES", exact)
    save(random_model(make_config("LlamaConfig", tie_word_embeddings=True, **SIZES)), tmp_path)
    layouts = (STAGES,) if scheme == "int8" else (THREE, STAGES)
    assert_ranks_answer_as_one(tmp_path, *layouts, quantization=scheme)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_are_stored_quantised(name: str, tmp_path: Path) -> None:
    """Groups and blocks that a rank has a part of, and inputs with one scale for all ranks."""
    config, write, inputs = FORMATS[name]
    write_checkpoint(tmp_path, config, write, inputs, **SIZES)
    assert_ranks_answer_as_one(tmp_path, TWO, STAGES)


def test_groups_of_inputs_that_ranks_would_share_are_refused(tmp_path: Path) -> None:
    config, write, inputs = FORMATS["FP8_BLOCK"]
    write_checkpoint(tmp_path, config, write, inputs, hidden_size=64, intermediate_size=48)
    with (
        pytest.raises(
            UnsupportedModel, match=r"mlp\.down_proj\.weight is quantised \(fp8-groups\) in a way that ranks"
        ),
        llm_of_threads(tmp_path, **TWO),
    ):
        pass


@pytest.mark.slow
def test_experts_that_are_quantised_while_they_load(tmp_path: Path) -> None:
    """Each rank has two of four experts whole; or a part of each expert of a layer."""
    save(mixture("mixtral"), tmp_path)
    assert_ranks_answer_as_one(tmp_path, EXPERTS, STAGES, quantization="int8")


@pytest.mark.slow
def test_experts_that_are_stored_quantised(tmp_path: Path) -> None:
    """Groups of which a rank has a part; a stage whose layers have no experts, beside one whose layers have."""
    config, write, inputs = FORMATS["W4A16"]
    config = {**config, "ignore": ["lm_head", "re:.*gate$"]}
    write_mixture(tmp_path / "all", "mixtral", config, write, inputs)
    assert_ranks_answer_as_one(tmp_path / "all", TWO)
    write_mixture(tmp_path / "second", "qwen3-moe", config, write, inputs, mlp_only_layers=[0], intermediate_size=64)
    assert_ranks_answer_as_one(tmp_path / "second", {"pipeline_parallel_size": 2})


def test_a_part_of_each_expert_is_refused_where_tokens_are_rounded(tmp_path: Path) -> None:
    config, write, inputs = FORMATS["FP8_DYNAMIC"]
    write_mixture(tmp_path, "mixtral", {**config, "ignore": ["lm_head", "re:.*gate$"]}, write, inputs)
    with (
        pytest.raises(
            UnsupportedModel, match=r"experts\.down_proj is quantised .*Use another .*enable_expert_parallel"
        ),
        llm_of_threads(tmp_path, **TWO),
    ):
        pass


def test_ranks_of_mxfp4_are_refused_as_those_of_floats_are(tmp_path: Path) -> None:
    """transformers has no plan for the attention of gpt-oss."""
    write_mxfp4(tmp_path)
    with pytest.raises(UnsupportedModel, match="no plan for tensor parallelism"), llm_of_threads(tmp_path, **TWO):
        pass
