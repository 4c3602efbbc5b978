"""Files whose experts are quantised: answers are those of the dequantised model, and bad files are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph.errors import CheckpointError, UnsupportedModel
from tests.runner.quantization.checkpoints.test_stored import assert_tokens_are_those_of
from tests.runner.quantization.checkpoints.written import FORMATS, Tensors, change_config, change_tensors
from tests.runner.quantization.expert_models import ALL, write_mixture
from tests.runner.quantization.test_llm_quantised import largest_difference, load

NOT_LEFT = {"ignore": ["lm_head", "re:.*gate$"], "modules_to_not_convert": ["lm_head", "gate"]}
"""Everything but routers and the head is quantised, by the fields of both kinds of config."""

CASES = [
    ("mixtral", "W4A16"),
    ("mixtral", "W8A8"),
    ("qwen3-moe", "FP8_DYNAMIC"),
    ("qwen3-moe", "FineGrainedFP8"),
    ("mixtral", "AWQ"),
]
SLOT = "model.layers.1.block_sparse_moe.experts.2"


def write(folder: Path, family: str, name: str) -> PreTrainedModel:
    config, stored, inputs = FORMATS[name]
    left = {key: NOT_LEFT[key] for key in NOT_LEFT if key in config}
    return write_mixture(folder, family, {**config, **left}, stored, inputs, **(ALL if inputs else {}))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), CASES)
def test_answers_are_those_of_the_dequantised_model(family: str, name: str, tmp_path: Path) -> None:
    """The linears of attention too; greedy tokens of 20 prompts.

    Where inputs are rounded, a value between two steps may go either way, in six products of a layer.
    """
    reference = write(tmp_path, family, name)
    bound = 1e-4 if FORMATS[name][2] is None else 5e-2
    with load(tmp_path, quantization=None, dtype="float32", enforce_eager=True) as llm:
        assert largest_difference(reference, llm) < bound
        assert_tokens_are_those_of(reference, llm, margin=max(bound, 2e-2))
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert "2 layers of experts are " in note and "8 linears are " in note


def another_expert(tensors: Tensors) -> None:
    tensors |= {name.replace("experts.2", "experts.4"): each.clone() for name, each in tensors.items()}


BAD: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("W4A16", lambda t: t.pop(f"{SLOT}.w3.weight_scale"), r"missing: .*experts\.2\.w3\.weight_scale"),
    ("W4A16", lambda t: [t.pop(name) for name in list(t) if f"{SLOT}.w1" in name], r"no tensors of .*experts\.2\.w1"),
    ("W4A16", lambda t: t.update({f"{SLOT}.w2.weight_scale": torch.ones(64, 5)}), r"w2\.weight_scale is F32 \[64, 5\]"),
    ("W4A16", lambda t: t[f"{SLOT}.w2.weight_scale"].fill_(float("inf")), "weight_scale has values that are infinite"),
    ("W4A16", another_expert, "the files have the expert 4 of .*, and the model 4 experts"),
    (
        "FP8_DYNAMIC",
        lambda t: t.update({f"{SLOT}.w2.weight": t[f"{SLOT}.w1.weight"][:64, :32].clone()}),
        "weight is F8",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), [*BAD[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in BAD[2:])]
)
def test_bad_files_are_refused(name: str, change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral", name)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path, quantization=None, enforce_eager=True)
    assert raised.value.exit_code == 3


def test_a_gate_that_is_not_known_is_named(tmp_path: Path) -> None:
    """The files are not blamed for what cannot be multiplied by."""
    write(tmp_path, "mixtral", "W4A16")
    change_config(tmp_path, lambda written: written.update(hidden_act="relu6"))
    message = r"experts are quantised, and those of model\.layers\.0\.mlp\.experts \(MixtralExperts\) .*: their gate"
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, quantization=None, enforce_eager=True)


def test_experts_of_several_schemes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", "W4A16")
    ignored = ["lm_head", "re:.*gate$", f"{SLOT}.w1"]
    change_config(tmp_path, lambda written: written["quantization_config"].update(ignore=ignored))
    with pytest.raises(UnsupportedModel, match=r"experts model\.layers\.1\.mlp\.experts are quantised in several ways"):
        load(tmp_path, quantization=None, enforce_eager=True)
