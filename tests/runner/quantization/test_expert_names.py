"""The names of experts in files, by transformers' conversion of checkpoints."""

from __future__ import annotations

import pytest

from piecegraph.runner.quantization.expert_names import ExpertNames, Place, expert_of
from tests.runner.quantization.expert_models import experts_of, mixture


@pytest.mark.parametrize(
    ("family", "before", "short"),
    [("mixtral", "block_sparse_moe", ("w1", "w3", "w2")), ("qwen3-moe", "mlp", ("gate_proj", "up_proj", "down_proj"))],
)
def test_linears_of_files_and_places_in_the_model_are_inverse(
    family: str, before: str, short: tuple[str, str, str]
) -> None:
    model = mixture(family)
    names = ExpertNames(model, experts_of(model))
    module = "model.layers.1.mlp.experts"
    first, second, third = (f"model.layers.1.{before}.experts.*.{each}" for each in short)
    assert names.linears(module, "gate_up_proj") == (first, second)
    assert names.linears(module, "down_proj") == (third,)
    for name, projection, part in ((first, "gate_up_proj", 0), (second, "gate_up_proj", 1), (third, "down_proj", 0)):
        found = names.place_of(f"{name.replace('*', '3')}.weight")
        assert found == Place(module, projection, 3, part)
    assert names.place_of(f"model.layers.1.{before}.gate.weight") is None


def test_tensors_of_all_experts_have_no_number() -> None:
    model = mixture("gpt-oss")
    names = ExpertNames(model, experts_of(model))
    module = "model.layers.0.mlp.experts"
    assert names.place_of(f"{module}.down_proj") == Place(module, "down_proj", None, 0)
    assert names.linears(module, "down_proj") == (f"{module}.*.down_proj",)


def test_the_number_is_where_the_pattern_has_its_last_star() -> None:
    assert expert_of("layers.3.experts.12.w1.weight", ".experts.*.w1.weight") == 12
    assert expert_of("layers.3.experts.w1.weight", ".experts.*.w1.weight") is None
