"""MXFP4: answers are those of the model that transformers makes of the same blocks, and bad files are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from piecegraph.errors import CheckpointError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from piecegraph.runner.quantization.checkpoints.all_formats import stored_checkpoint
from piecegraph.runner.quantization.methods.linear_method import Scheme
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from tests.runner.quantization.checkpoints.test_stored import assert_tokens_are_those_of
from tests.runner.quantization.checkpoints.written import Tensors, change_config, change_tensors
from tests.runner.quantization.expert_models import MXFP4, write_mxfp4
from tests.runner.quantization.test_llm_quantised import largest_difference, load


@pytest.mark.slow
def test_answers_of_mxfp4_are_those_of_the_model_that_transformers_makes(tmp_path: Path) -> None:
    """Biases, gates between limits and sinks; experts stay in 4 bits, attention and the router in floats."""
    reference = write_mxfp4(tmp_path)
    with load(tmp_path, quantization=None, dtype="float32", enforce_eager=True, max_model_len=64) as llm:
        assert largest_difference(reference, llm) < 1e-4
        assert_tokens_are_those_of(reference, llm)
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert note.startswith("quantization: 2 layers of experts are mxfp4 in groups of 32; experts by the linears")
        assert "2 x GptOssTopKRouter.weight" in note and "0.1 MB uint8" in note


EXPERTS = "model.layers.0.mlp.experts"

BAD_MXFP4: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), r"missing: .*experts\.down_proj_scales"),
    (lambda t: t.pop(f"{EXPERTS}.gate_up_proj_blocks"), r"missing: .*experts\.gate_up_proj_blocks"),
    (
        lambda t: t.update({f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"][:, :, :2].clone()}),
        r"down_proj_scales is U8 \[64, 2\] in the files, and the module needs U8 \[64, 3\]",
    ),
    (
        lambda t: t.update({f"{EXPERTS}.down_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"].flatten(2)}),
        r"down_proj_blocks is U8 \[64, 48\] in the files",
    ),
    (
        lambda t: t.update({f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"].float()}),
        "down_proj_scales is F32 .* needs U8",
    ),
    (lambda t: t[f"{EXPERTS}.gate_up_proj_scales"].fill_(255), "gate_up_proj_scales has values that are not numbers"),
    (
        lambda t: t.update({f"{EXPERTS}.down_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"][:3].clone()}),
        r"down_proj has \[3, 4\] experts in the files, and the model 4",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [*BAD_MXFP4[:3], *(pytest.param(*each, marks=pytest.mark.slow) for each in BAD_MXFP4[3:])]
)
def test_bad_files_of_mxfp4_are_refused(change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path, quantization=None, enforce_eager=True)
    assert raised.value.exit_code == 3


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    change_config(tmp_path, lambda written: written.update(intermediate_size=80))
    with pytest.raises(CheckpointError, match=r"experts model\.layers\.0.* groups of 32 do not divide its 80 columns"):
        load(tmp_path, quantization=None, enforce_eager=True)


def test_experts_that_the_config_leaves_alone_are_floats() -> None:
    config = {**MXFP4, "modules_to_not_convert": ["model.layers.1.mlp"]}
    stored = stored_checkpoint(config)
    assert stored is not None
    schemes = [
        stored.scheme_of(path, "Linear")
        for path in ("model.layers.0.mlp.experts.0.down_proj", "model.layers.1.mlp.experts.0.down_proj", "lm_head")
    ]
    assert schemes == [Scheme(method="mxfp4", group_size=32), None, None]


def test_a_rank_reads_its_experts_alone(tmp_path: Path) -> None:
    """Those of the second of two engines that share experts, with their biases."""
    write_mxfp4(tmp_path)
    source = ModelSource(model=str(tmp_path))
    loaded = load_model(
        source,
        load_config(source),
        dtype=torch.float32,
        device=torch.device("cpu"),
        experts=ExpertRanks(engine=1, num_engines=2),
    )
    held, stored = loaded.model.state_dict(), load_file(tmp_path / "model.safetensors")
    for short in ("gate_up_proj", "down_proj"):
        name = f"{EXPERTS}.{short}"
        assert torch.equal(held[f"{name}_packed"], stored[f"{name}_blocks"][2:].flatten(2))
        assert torch.equal(held[f"{name}_scale"], stored[f"{name}_scales"][2:])
        assert torch.equal(held[f"{name}_bias"], stored[f"{name}_bias"][2:])
    everything = sum(tensor.nbytes for tensor in stored.values())
    assert loaded.bytes_read is not None and loaded.bytes_read < everything
